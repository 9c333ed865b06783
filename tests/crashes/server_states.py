"""The states of a deployment in which the crash tests kill the server with SIGKILL.

The states follow the life of a run: the start, a client's joining, an order, its reply, the end of
a round, the end of the run, and the restart of a process that was killed before. The comment on a
state says what has happened when the process is killed, and what has not.
"""

from collections.abc import Callable
from typing import Any

from crashes.state import (
    CLIENTS,
    FOLDER,
    ROUNDS,
    RUN_FOLDER,
    drops,
    is_complete,
    is_state,
    named,
    server,
)
from crashes.ways import (
    after,
    before,
    half_cleared,
    half_deleted,
    half_file,
    half_lines,
    half_order,
    half_piece,
    half_sent,
)

EACH = len(CLIENTS)
"""The number of times that the server does something for each client once."""
STEPS = EACH * ROUNDS
"""The number of times that the server does something for each client in each round."""
REPLIES = STEPS + 2 * EACH
"""The number of replies in a run: to joins, to steps, and to the orders that end the run."""
SERVER = "coterie.deployment.server:ServerRun"
MAILBOX = "coterie.network.mailbox:Mailbox"
HTTPS = "coterie.network.server:MailboxServer"
FILES = "coterie.network.order_files"
STORE, DROP = f"{FILES}:OrderFiles.__init__", f"{RUN_FOLDER}.drop"
JOINS = "coterie.deployment.joins:Joins"


def of_kind(kind: str) -> Callable[..., bool]:
    """Accept the methods of a `ServerRun` while it sends orders of this kind."""
    return lambda run, *_: run.kind == kind


def is_first(order: Any, _: bytes) -> bool:
    """Accept calls of `Order.append` with the first piece of a reply."""
    return order.received == 0


def is_over(folder: Any, _: object) -> bool:
    """Accept calls of `RunFolder.append` after the last round."""
    return folder.turns() == ROUNDS


def sends(kind: str) -> Callable[..., bool]:
    """Accept calls of `ServerRun._send` with an order of this kind."""
    return lambda run, client, sent: sent == kind


# The round's lines are in metrics.jsonl; its checkpoint is not begun.
APPENDED = server("metrics appended", f"{RUN_FOLDER}.append", after, ROUNDS)
# The checkpoint and the metrics are on disk; the next round is not begun.
SAVED = server("round saved", f"{SERVER}._save", after, ROUNDS)
# The order is in the client's inbox; the client has not requested it.
ANNOUNCED = server("order announced", f"{MAILBOX}.send", after, REPLIES)
STARTS = (
    # The run folder exists; half of run.json is in a temporary file.
    server("run.json half written", f"{FOLDER}:write_json", half_file, of=named("run.json")),
    # run.json is written; the mailbox's folder does not exist.
    server("folder created", STORE, before),
    # The port is open; no connection has been accepted.
    server("listening", f"{HTTPS}.__enter__", before),
    # Half of status.json is in a temporary file.
    server("status half written", "coterie.deployment.status:Monitor.save", half_file),
    # A client's session is registered; the request is not processed.
    server("first request", f"{MAILBOX}.enter", after, EACH),
)
SERVER_JOINS = (
    # The order to join is announced; the client has not replied.
    server("join order sent", f"{SERVER}._send", after, EACH, of=sends("join")),
    # The client's hello is read; the method has not prepared for the client.
    server("hello received", f"{JOINS}.begin", before, EACH),
    # The method has prepared for the client, which has not joined.
    server("client prepared", f"{JOINS}._join", before, EACH),
    # The client has joined; it has no order, and no checkpoint contains it.
    server("client joined", f"{SERVER}._joined", after, EACH),
)
SERVER_ORDERS = (
    # The method has begun a round; no order is made.
    server("round opened", "coterie.engines.server_host:ServerHost.open", after, ROUNDS),
    # Half of an order is in its file.
    server("order half written", f"{FILES}:OrderFiles.write", half_order, REPLIES),
    # The order is in its file; it is not in the client's inbox.
    server("order stored", f"{FILES}:OrderFiles.write", after, REPLIES),
    ANNOUNCED,
    # The client has requested the order; nothing is sent.
    server("order requested", f"{HTTPS}._send_order", before, REPLIES),
    # Some pieces of the order and half of the next one are sent.
    server("order half sent", "aiohttp.web:StreamResponse.write", half_sent, 2 * REPLIES),
    # The whole order is sent; the client executes it.
    server("order sent", f"{HTTPS}._send_order", after, REPLIES),
    # The client has requested how much of the reply has arrived.
    server("reply announced", f"{HTTPS}._report_progress", after, REPLIES),
    # Part of the reply is in its file; the rest has not arrived.
    server("reply half received", f"{FILES}:Order.append", half_piece, REPLIES, of=is_first),
    # The reply is in its file and its hash is right; it is not accepted.
    server("reply received", f"{MAILBOX}.complete", before, REPLIES),
    # The reply is accepted; the client is not told, and the run has not read it.
    server("reply accepted", f"{MAILBOX}.complete", after, REPLIES),
    # The handler has returned the response to the client.
    server("reply acknowledged", f"{HTTPS}._receive_reply", after, REPLIES),
    # The run is about to read the reply's file.
    server("reply not read", f"{FILES}:Order.take", before, REPLIES),
    # The reply is in memory, and its file is deleted; it is not checked.
    server("reply read", f"{FILES}:Order.take", after, REPLIES),
)
SERVER_ROUNDS = (
    # The upload is checked and stored; the client is still waited for.
    server("upload stored", "coterie.engines.server_host:ServerHost.take", after, STEPS),
    # The client is not waited for any more.
    server("reply counted", f"{SERVER}._complete_order", after, STEPS, of=of_kind("step")),
    # All uploads are stored; none is aggregated.
    server("uploads complete", "coterie.exchanges.exchange:Exchange.settle", before, ROUNDS),
    # The uploads are aggregated; the round is not closed.
    server("mean computed", "coterie.engines.server_host:ServerHost._aggregated", after, ROUNDS),
    # The method has the new state in memory; nothing is on disk.
    server("round closed", f"{SERVER}._settle", after, ROUNDS),
    # Half of the bytes of the round's lines are in metrics.jsonl.
    server("metrics half appended", f"{RUN_FOLDER}.append", half_lines, ROUNDS),
    APPENDED,
    # Half of a state is in a temporary file of a temporary folder.
    server("checkpoint half written", f"{FOLDER}:write_bytes", half_file, 2 * ROUNDS, of=is_state),
    # The checkpoint is complete in a temporary folder.
    server("checkpoint not renamed", f"{FOLDER}:write_json", after, ROUNDS, of=is_complete),
    # The checkpoint has its name; no older one is deleted.
    server("checkpoint renamed", f"{FOLDER}:write_folder", after, ROUNDS),
    # Half of the files of the oldest checkpoint are deleted.
    server("older checkpoint half deleted", DROP, half_deleted, ROUNDS - 2, of=drops),
    SAVED,
)
SERVER_ENDS = (
    # The order that ends the run is announced to a client.
    server("finish order sent", f"{SERVER}._send", after, EACH, of=sends("finish")),
    # A client's last reply is read; its metrics are only in memory.
    server("finish reply counted", f"{SERVER}._complete_order", after, EACH, of=of_kind("finish")),
    # Half of the bytes of the last lines are in metrics.jsonl.
    server("last metrics half appended", f"{RUN_FOLDER}.append", half_lines, of=is_over),
    # All metrics are on disk; the result is not.
    server("last metrics appended", f"{RUN_FOLDER}.finish", before),
    # Half of result.json is in a temporary file.
    server("result half written", f"{RUN_FOLDER}.finish", half_file),
    # The result is on disk; the process has not ended.
    server("result written", f"{RUN_FOLDER}.finish", after),
)
SERVER_RESUMED = (
    # Half of the files of orders and replies are deleted.
    server("resumed: old orders half deleted", STORE, half_cleared, first=ANNOUNCED),
    # Some clients have joined again; the method's state is not restored.
    server("resumed: joins half restored", f"{JOINS}._join", after, EACH, first=SAVED),
    # The lines of the repeated round are not yet removed; half of the new file is written.
    server("resumed: metrics half cut", f"{RUN_FOLDER}.rewrite", half_file, first=APPENDED),
    # The state and the metrics are those of the newest checkpoint; no client is connected.
    server("resumed: state restored", f"{SERVER}._restore", after, first=APPENDED),
)
SERVER_STATES = STARTS + SERVER_JOINS + SERVER_ORDERS + SERVER_ROUNDS + SERVER_ENDS + SERVER_RESUMED
