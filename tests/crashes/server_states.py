"""The states of a deployment in which the crash tests kill the server with SIGKILL.

The states follow the life of a run: the start, a client's joining, an order, its reply, the end of
a round, the end of the run, and the restart of a process that was killed before. A sentence says
what has happened when the process is killed, and what has not.
"""

from collections.abc import Callable

from crashes.state import (
    CLIENTS,
    FOLDER,
    ROUNDS,
    RUN_FOLDER,
    drops,
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


def of_kind(kind: str) -> Callable[..., bool]:
    """Accept the methods of a `ServerRun` while it sends orders of this kind."""
    return lambda run, *_: run.kind == kind


def sends(kind: str) -> Callable[..., bool]:
    """Accept calls of `ServerRun._send` with an order of this kind."""
    return lambda run, client, sent: sent == kind


APPENDED = server(
    "metrics appended",
    "The round's lines are in metrics.jsonl; its checkpoint is not begun.",
    f"{RUN_FOLDER}.append",
    after,
    ROUNDS,
)
SAVED = server(
    "round saved",
    "The checkpoint and the metrics are on disk; the next round is not begun.",
    f"{SERVER}._save",
    after,
    ROUNDS,
)
ANNOUNCED = server(
    "order announced",
    "The order is in the client's inbox; the client has not requested it.",
    f"{MAILBOX}.send",
    after,
    REPLIES,
)
STARTS = (
    server(
        "run.json half written",
        "The run folder exists; half of run.json is in a temporary file.",
        f"{FOLDER}:write_json",
        half_file,
        of=named("run.json"),
    ),
    server(
        "folder created",
        "run.json is written; the mailbox's folder does not exist.",
        f"{FILES}:OrderFiles.__init__",
        before,
    ),
    server(
        "listening",
        "The port is open; no connection has been accepted.",
        f"{HTTPS}.__enter__",
        before,
    ),
    server(
        "status half written",
        "Half of status.json is in a temporary file.",
        "coterie.deployment.status:Monitor.save",
        half_file,
    ),
    server(
        "first request",
        "A client's session is registered; the request is not processed.",
        f"{MAILBOX}.enter",
        after,
        EACH,
    ),
)
SERVER_JOINS = (
    server(
        "join order sent",
        "The order to join is announced; the client has not replied.",
        f"{SERVER}._send",
        after,
        EACH,
        of=sends("join"),
    ),
    server(
        "hello received",
        "The client's hello is read; the method has not prepared for the client.",
        "coterie.deployment.joins:Joins.begin",
        before,
        EACH,
    ),
    server(
        "client prepared",
        "The method has prepared for the client, which has not joined.",
        "coterie.deployment.joins:Joins._join",
        before,
        EACH,
    ),
    server(
        "client joined",
        "The client has joined; it has no order, and no checkpoint contains it.",
        f"{SERVER}._joined",
        after,
        EACH,
    ),
)
SERVER_ORDERS = (
    server(
        "round opened",
        "The method has begun a round; no order is made.",
        "coterie.engines.server_host:ServerHost.open",
        after,
        ROUNDS,
    ),
    server(
        "order half written",
        "Half of an order is in its file.",
        f"{FILES}:OrderFiles.write",
        half_order,
        REPLIES,
    ),
    server(
        "order stored",
        "The order is in its file; it is not in the client's inbox.",
        f"{FILES}:OrderFiles.write",
        after,
        REPLIES,
    ),
    ANNOUNCED,
    server(
        "order requested",
        "The client has requested the order; nothing is sent.",
        f"{HTTPS}._send_order",
        before,
        REPLIES,
    ),
    server(
        "order half sent",
        "Some pieces of the order and half of the next one are sent.",
        "aiohttp.web:StreamResponse.write",
        half_sent,
        2 * REPLIES,
    ),
    server(
        "order sent",
        "The whole order is sent; the client executes it.",
        f"{HTTPS}._send_order",
        after,
        REPLIES,
    ),
    server(
        "reply announced",
        "The client has requested how much of the reply has arrived.",
        f"{HTTPS}._report_progress",
        after,
        REPLIES,
    ),
    server(
        "reply half received",
        "Part of the reply is in its file; the rest has not arrived.",
        f"{FILES}:Order.append",
        half_piece,
        REPLIES,
        of=lambda order, _: order.received == 0,
    ),
    server(
        "reply received",
        "The reply is in its file and its hash is right; it is not accepted.",
        f"{MAILBOX}.complete",
        before,
        REPLIES,
    ),
    server(
        "reply accepted",
        "The reply is accepted; the client is not told, and the run has not read it.",
        f"{MAILBOX}.complete",
        after,
        REPLIES,
    ),
    server(
        "reply acknowledged",
        "The handler has returned the response to the client.",
        f"{HTTPS}._receive_reply",
        after,
        REPLIES,
    ),
    server(
        "reply not read",
        "The run is about to read the reply's file.",
        f"{FILES}:Order.take",
        before,
        REPLIES,
    ),
    server(
        "reply read",
        "The reply is in memory, and its file is deleted; it is not checked.",
        f"{FILES}:Order.take",
        after,
        REPLIES,
    ),
)
SERVER_ROUNDS = (
    server(
        "upload stored",
        "The upload is checked and stored; the client is still waited for.",
        "coterie.engines.server_host:ServerHost.take",
        after,
        STEPS,
    ),
    server(
        "reply counted",
        "The client is not waited for any more.",
        f"{SERVER}._complete_order",
        after,
        STEPS,
        of=of_kind("step"),
    ),
    server(
        "uploads complete",
        "All uploads are stored; none is aggregated.",
        "coterie.exchanges.exchange:Exchange.settle",
        before,
        ROUNDS,
    ),
    server(
        "mean computed",
        "The uploads are aggregated; the round is not closed.",
        "coterie.engines.server_host:ServerHost._aggregated",
        after,
        ROUNDS,
    ),
    server(
        "round closed",
        "The method has the new state in memory; nothing is on disk.",
        f"{SERVER}._settle",
        after,
        ROUNDS,
    ),
    server(
        "metrics half appended",
        "Half of the bytes of the round's lines are in metrics.jsonl.",
        f"{RUN_FOLDER}.append",
        half_lines,
        ROUNDS,
    ),
    APPENDED,
    server(
        "checkpoint half written",
        "Half of a state is in a temporary file of a temporary folder.",
        f"{FOLDER}:write_bytes",
        half_file,
        2 * ROUNDS,
        of=is_state,
    ),
    server(
        "checkpoint not renamed",
        "The checkpoint is complete in a temporary folder.",
        f"{FOLDER}:write_json",
        after,
        ROUNDS,
        of=named("checksums.json"),
    ),
    server(
        "checkpoint renamed",
        "The checkpoint has its name; no older one is deleted.",
        f"{FOLDER}:write_folder",
        after,
        ROUNDS,
    ),
    server(
        "older checkpoint half deleted",
        "Half of the files of the oldest checkpoint are deleted.",
        f"{RUN_FOLDER}.drop",
        half_deleted,
        ROUNDS - 2,
        of=drops,
    ),
    SAVED,
)
SERVER_ENDS = (
    server(
        "finish order sent",
        "The order that ends the run is announced to a client.",
        f"{SERVER}._send",
        after,
        EACH,
        of=sends("finish"),
    ),
    server(
        "finish reply counted",
        "A client's last reply is read; its metrics are only in memory.",
        f"{SERVER}._complete_order",
        after,
        EACH,
        of=of_kind("finish"),
    ),
    server(
        "last metrics half appended",
        "Half of the bytes of the last lines are in metrics.jsonl.",
        f"{RUN_FOLDER}.append",
        half_lines,
        of=lambda folder, _: folder.turns() == ROUNDS,
    ),
    server(
        "last metrics appended",
        "All metrics are on disk; the result is not.",
        f"{RUN_FOLDER}.finish",
        before,
    ),
    server(
        "result half written",
        "Half of result.json is in a temporary file.",
        f"{RUN_FOLDER}.finish",
        half_file,
    ),
    server(
        "result written",
        "The result is on disk; the process has not ended.",
        f"{RUN_FOLDER}.finish",
        after,
    ),
)
SERVER_RESUMED = (
    server(
        "resumed: old orders half deleted",
        "Half of the files of orders and replies are deleted.",
        f"{FILES}:OrderFiles.__init__",
        half_cleared,
        first=ANNOUNCED,
    ),
    server(
        "resumed: joins half restored",
        "Some clients have joined again; the method's state is not restored.",
        "coterie.deployment.joins:Joins._join",
        after,
        EACH,
        first=SAVED,
    ),
    server(
        "resumed: metrics half cut",
        "The lines of the repeated round are not yet removed; half of the new file is written.",
        f"{RUN_FOLDER}.rewrite",
        half_file,
        first=APPENDED,
    ),
    server(
        "resumed: state restored",
        "The state and the metrics are those of the newest checkpoint; no client is connected.",
        f"{SERVER}._restore",
        after,
        first=APPENDED,
    ),
)
SERVER_STATES = {
    "start": STARTS,
    "join": SERVER_JOINS,
    "order and reply": SERVER_ORDERS,
    "round": SERVER_ROUNDS,
    "end": SERVER_ENDS,
    "restart": SERVER_RESUMED,
}
