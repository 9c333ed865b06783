"""The states of a deployment in which the crash tests kill a client with SIGKILL.

`server_states.py` has the states of the server.
"""

from typing import Any

from crashes.state import FOLDER, ROUNDS, RUN_FOLDER, client, drops, is_state, named
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


STEPPED = client(
    "step complete",
    "The state and the upload are on disk; the reply is not made.",
    f"{CLIENT}.step",
    after,
    ROUNDS,
)
TRAINED = client(
    "round half trained",
    "Some optimiser steps of the round are done.",
    "coterie.training.update:Updater.update",
    after,
    2 * ROUNDS,
)
CLIENT_STARTS = (
    client(
        "started",
        "The process runs; it has not connected.",
        f"{CONNECTION}.__enter__",
        before,
    ),
    client(
        "session opened",
        "The server has responded to the first request.",
        f"{NETWORK}:end_empty",
        before,
    ),
    client(
        "waiting for an order",
        "A request for an order is on its way or waits for its response.",
        f"{CONNECTION}.next_order",
        during,
        ORDERS,
    ),
)
CLIENT_JOINS = (
    client(
        "run.json half written",
        "The client's run folder exists; half of run.json is in a temporary file.",
        f"{FOLDER}:write_json",
        half_file,
        of=named("run.json"),
    ),
    client(
        "folder created",
        "run.json is written; there is no checkpoint.",
        f"{CLIENT}._save",
        before,
        of=has_round(-1),
    ),
    client(
        "first checkpoint written",
        "The state before the first step is on disk; the hello is not made.",
        f"{CLIENT}._save",
        after,
        of=has_round(-1),
    ),
    client(
        "hello made",
        "The reply to the order to join is made; nothing of it is sent.",
        f"{WORKER}._join",
        after,
    ),
)
CLIENT_ORDERS = (
    client(
        "order announced",
        "The client knows the order's ticket; nothing is downloaded.",
        f"{CONNECTION}._download",
        before,
        ORDERS,
    ),
    client(
        "order half downloaded",
        "Half of the order is in memory.",
        "httpx:Response.iter_raw",
        half_received,
        ORDERS,
        of=is_order,
    ),
    client(
        "order downloaded",
        "The whole order is in memory, and its hash is right; it is not begun.",
        f"{WORKER}.answer",
        before,
        ORDERS,
    ),
)
CLIENT_STEPS = (
    client(
        "previous round not committed",
        "The order shows that the last upload counted; its metrics are not appended.",
        f"{CLIENT}._commit",
        before,
        ROUNDS,
    ),
    client(
        "metrics half written",
        "Half of the new metrics.jsonl is in a temporary file.",
        f"{RUN_FOLDER}.rewrite",
        half_file,
        ROUNDS,
    ),
    client(
        "metrics written",
        "The metrics are on disk; the older checkpoint is not deleted.",
        f"{RUN_FOLDER}.rewrite",
        after,
        ROUNDS,
    ),
    client(
        "older checkpoint half deleted",
        "Half of the files of the older checkpoint are deleted.",
        f"{RUN_FOLDER}.drop",
        half_deleted,
        ROUNDS,
        of=drops,
    ),
    client(
        "previous round committed",
        "The last upload is committed; the order is not begun.",
        f"{CLIENT}._settle",
        after,
        ROUNDS,
    ),
    client(
        "training half counted",
        "Half of the count of the round's trainings is in a temporary file.",
        "coterie.deployment.orders:write_json",
        half_file,
        ROUNDS,
    ),
    client(
        "training counted",
        "The round's training is counted; it is not begun.",
        "coterie.deployment.orders:Orders.count_training",
        after,
        ROUNDS,
    ),
    TRAINED,
    client(
        "upload computed",
        "The state and the upload are in memory only.",
        f"{PART}.step",
        after,
        ROUNDS,
    ),
    client(
        "scores written",
        "The scores of the test windows are on disk; the state is not.",
        f"{PART}.keep_items",
        after,
        ROUNDS,
    ),
    client(
        "checkpoint half written",
        "Half of a state is in a temporary file of a temporary folder.",
        f"{FOLDER}:write_bytes",
        half_file,
        SAVES,
        of=is_state,
    ),
    client(
        "upload half written",
        "Half of the upload is in a temporary file of the checkpoint's temporary folder.",
        f"{FOLDER}:write_bytes",
        half_file,
        ROUNDS,
        of=named("upload"),
    ),
    client(
        "checkpoint not renamed",
        "The checkpoint with the upload is complete in a temporary folder.",
        f"{FOLDER}:write_json",
        after,
        SAVES,
        of=named("checksums.json"),
    ),
    client(
        "checkpoint renamed",
        "The checkpoint has its name; no older one is deleted.",
        f"{FOLDER}:write_folder",
        after,
        SAVES,
    ),
    STEPPED,
)
CLIENT_REPLIES = (
    client(
        "reply made",
        "The reply is in memory; nothing of it is sent.",
        f"{CONNECTION}._send_reply",
        before,
        ORDERS,
    ),
    client(
        "reply announced",
        "The server has said that it has received nothing; the upload is not begun.",
        f"{NETWORK}:_pieces",
        before,
        ORDERS,
    ),
    client(
        "reply half uploaded",
        "Half of the reply is passed to the socket.",
        f"{NETWORK}:_pieces",
        half_uploaded,
        ORDERS,
    ),
    client(
        "reply uploaded",
        "The whole reply is passed to the socket; no response has arrived.",
        f"{NETWORK}:_pieces",
        after,
        ORDERS,
    ),
    client(
        "reply accepted",
        "The server has accepted the reply; the client has not requested the next order.",
        f"{CONNECTION}._send_reply",
        after,
        ORDERS,
    ),
)
CLIENT_ENDS = (
    client(
        "last download not applied",
        "The last round is committed; the last download is not applied.",
        f"{PART}.finish",
        before,
    ),
    client(
        "last download applied",
        "The last download is applied and scored in memory only.",
        f"{PART}.finish",
        after,
    ),
    client(
        "end saved",
        "The last checkpoint is on disk; its metrics are not committed.",
        f"{CLIENT}._save",
        after,
        of=has_round(ROUNDS),
    ),
    client(
        "end committed",
        "The metrics are on disk; the result is not.",
        f"{RUN_FOLDER}.finish",
        before,
    ),
    client(
        "result half written",
        "Half of result.json is in a temporary file.",
        f"{RUN_FOLDER}.finish",
        half_file,
    ),
    client(
        "result written",
        "The result is on disk; the reply is not made.",
        f"{RUN_FOLDER}.finish",
        after,
    ),
    client(
        "finished",
        "The server has the last reply; the session is not ended.",
        f"{CONNECTION}.__exit__",
        before,
    ),
    client(
        "session ended",
        "The server knows that the client has left; the process has not ended.",
        f"{CONNECTION}.__exit__",
        after,
    ),
)
CLIENT_RESUMED = (
    client(
        "resumed: state not restored",
        "The run folder is locked; nothing is read.",
        f"{CLIENT}._restore",
        before,
        first=TRAINED,
    ),
    client(
        "resumed: state restored",
        "The newest checkpoint is in memory; the reply to the order to join is not made.",
        f"{CLIENT}._restore",
        after,
        first=STEPPED,
    ),
    client(
        "resumed: round trained again",
        "The repeated round is on disk; the reply is not made.",
        f"{CLIENT}.step",
        after,
        first=TRAINED,
    ),
    client(
        "resumed: stored upload read",
        "The reply with the stored upload is made; nothing of it is sent.",
        f"{CLIENT}.step",
        after,
        first=STEPPED,
    ),
)
CLIENT_STATES = {
    "start": CLIENT_STARTS,
    "join": CLIENT_JOINS,
    "order": CLIENT_ORDERS,
    "step": CLIENT_STEPS,
    "reply": CLIENT_REPLIES,
    "end": CLIENT_ENDS,
    "restart": CLIENT_RESUMED,
}
