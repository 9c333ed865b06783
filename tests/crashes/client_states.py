"""The states of a deployment in which the crash tests kill a client with SIGKILL.

`server_states.py` has the states of the server.
"""

from typing import Any

from crashes.state import FOLDER, ROUNDS, RUN_FOLDER, client, drops, is_complete, is_state, named
from crashes.ways import (
    after,
    before,
    during,
    half_deleted,
    half_file,
    half_received,
    half_uploaded,
)

CLIENT = "coterie.deployment.client:SiteRun"
WORKER = "coterie.deployment.client:Worker"
NETWORK = "coterie.network.client"
CONNECTION = f"{NETWORK}:Connection"
PART = "coterie.engines.client_host:ClientHost"
ORDERS = ROUNDS + 2
"""The number of a client's orders: to join, a step in each round, and the end of the run."""
SAVES = ROUNDS + 2
"""The number of a client's checkpoints: before the first step, after each step, and at the end."""


def is_order(response: Any) -> bool:
    """Accept responses that contain an order."""
    return response.request.url.path.startswith("/orders/")


def has_round(round: int) -> Any:
    """Accept calls of `SiteRun._save` after this round; -1 is the state before the first one."""
    return lambda run, about: about.turn == round


# The state and the upload are on disk; the reply is not made.
STEPPED = client("step complete", f"{CLIENT}.step", after, ROUNDS)
# Some optimiser steps of the round are done.
TRAINED = client("round half trained", "coterie.training.update:Updater.update", after, 2 * ROUNDS)
CLIENT_STARTS = (
    # The process runs; it has not connected.
    client("started", f"{CONNECTION}.__enter__", before),
    # The server has responded to the first request.
    client("session opened", f"{NETWORK}:end_empty", before),
    # A request for an order is on its way or waits for its response.
    client("waiting for an order", f"{CONNECTION}.next_order", during, ORDERS),
)
CLIENT_JOINS = (
    # The client's run folder exists; half of run.json is in a temporary file.
    client("run.json half written", f"{FOLDER}:write_json", half_file, of=named("run.json")),
    # run.json is written; there is no checkpoint.
    client("folder created", f"{CLIENT}._save", before, of=has_round(-1)),
    # The state before the first step is on disk; the hello is not made.
    client("first checkpoint written", f"{CLIENT}._save", after, of=has_round(-1)),
    # The reply to the order to join is made; nothing of it is sent.
    client("hello made", f"{WORKER}._join", after),
)
CLIENT_ORDERS = (
    # The client knows the order's ticket; nothing is downloaded.
    client("order announced", f"{CONNECTION}._download", before, ORDERS),
    # Half of the order is in memory.
    client("order half downloaded", "httpx:Response.iter_raw", half_received, ORDERS, of=is_order),
    # The whole order is in memory, and its hash is right; it is not begun.
    client("order downloaded", f"{WORKER}.answer", before, ORDERS),
)
CLIENT_STEPS = (
    # The order shows that the last upload counted; its metrics are not appended.
    client("previous round not committed", f"{CLIENT}._commit", before, ROUNDS),
    # Half of the new metrics.jsonl is in a temporary file.
    client("metrics half written", f"{RUN_FOLDER}.rewrite", half_file, ROUNDS),
    # The metrics are on disk; the older checkpoint is not deleted.
    client("metrics written", f"{RUN_FOLDER}.rewrite", after, ROUNDS),
    # Half of the files of the older checkpoint are deleted.
    client("older checkpoint half deleted", f"{RUN_FOLDER}.drop", half_deleted, ROUNDS, of=drops),
    # The last upload is committed; the order is not begun.
    client("previous round committed", f"{CLIENT}._settle", after, ROUNDS),
    # Half of the count of the round's trainings is in a temporary file.
    client("training half counted", "coterie.deployment.orders:write_json", half_file, ROUNDS),
    # The round's training is counted; it is not begun.
    client("training counted", "coterie.deployment.orders:Orders.count_training", after, ROUNDS),
    TRAINED,
    # The state and the upload are in memory only.
    client("upload computed", f"{PART}.step", after, ROUNDS),
    # The scores of the test windows are on disk; the state is not.
    client("scores written", f"{PART}.keep_items", after, ROUNDS),
    # Half of a state is in a temporary file of a temporary folder.
    client("checkpoint half written", f"{FOLDER}:write_bytes", half_file, SAVES, of=is_state),
    # Half of the upload is in a temporary file of the checkpoint's temporary folder.
    client("upload half written", f"{FOLDER}:write_bytes", half_file, ROUNDS, of=named("upload")),
    # The checkpoint with the upload is complete in a temporary folder.
    client("checkpoint not renamed", f"{FOLDER}:write_json", after, SAVES, of=is_complete),
    # The checkpoint has its name; no older one is deleted.
    client("checkpoint renamed", f"{FOLDER}:write_folder", after, SAVES),
    STEPPED,
)
CLIENT_REPLIES = (
    # The reply is in memory; nothing of it is sent.
    client("reply made", f"{CONNECTION}._send_reply", before, ORDERS),
    # The server has said that it has received nothing; the upload is not begun.
    client("reply announced", f"{NETWORK}:_pieces", before, ORDERS),
    # Half of the reply is passed to the socket.
    client("reply half uploaded", f"{NETWORK}:_pieces", half_uploaded, ORDERS),
    # The whole reply is passed to the socket; no response has arrived.
    client("reply uploaded", f"{NETWORK}:_pieces", after, ORDERS),
    # The server has accepted the reply; the client has not requested the next order.
    client("reply accepted", f"{CONNECTION}._send_reply", after, ORDERS),
)
CLIENT_ENDS = (
    # The last round is committed; the last download is not applied.
    client("last download not applied", f"{PART}.finish", before),
    # The last download is applied and scored in memory only.
    client("last download applied", f"{PART}.finish", after),
    # The last checkpoint is on disk; its metrics are not committed.
    client("end saved", f"{CLIENT}._save", after, of=has_round(ROUNDS)),
    # The metrics are on disk; the result is not.
    client("end committed", f"{RUN_FOLDER}.finish", before),
    # Half of result.json is in a temporary file.
    client("result half written", f"{RUN_FOLDER}.finish", half_file),
    # The result is on disk; the reply is not made.
    client("result written", f"{RUN_FOLDER}.finish", after),
    # The server has the last reply; the session is not ended.
    client("finished", f"{CONNECTION}.__exit__", before),
    # The server knows that the client has left; the process has not ended.
    client("session ended", f"{CONNECTION}.__exit__", after),
)
CLIENT_RESUMED = (
    # The run folder is locked; nothing is read.
    client("resumed: state not restored", f"{CLIENT}._restore", before, first=TRAINED),
    # The newest checkpoint is in memory; the reply to the order to join is not made.
    client("resumed: state restored", f"{CLIENT}._restore", after, first=STEPPED),
    # The repeated round is on disk; the reply is not made.
    client("resumed: round trained again", f"{CLIENT}.step", after, first=TRAINED),
    # The reply with the stored upload is made; nothing of it is sent.
    client("resumed: stored upload read", f"{CLIENT}.step", after, first=STEPPED),
)
CLIENT_STATES = (CLIENT_STARTS + CLIENT_JOINS + CLIENT_ORDERS + CLIENT_STEPS + CLIENT_REPLIES) + (
    CLIENT_ENDS + CLIENT_RESUMED
)
