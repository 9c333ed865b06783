"""Uploads that wait on the server until the phases after training are complete."""

from collections.abc import Mapping
from typing import Any

from coterie.exchanges.lazy import Lazy, Upload, loaded, unread
from coterie.messages import Message, State
from coterie.runs.store import Store

Waiting = dict[str, tuple[Upload, float] | None]
"""The upload and the weight of each client that trained; None if the upload is excluded."""
WAITING = "waiting uploads"
"""The key of the uploads in the state; no field of a server's value can have this name."""


def waiting_state(waiting: Waiting) -> State:
    """Return uploads as a state, which can be added to the state of the server's value.

    As in `Value.state`, the tensors of each client are in a nested state, and clients' names are
    keys, so that the data of a client that leaves can be deleted.
    """
    values, parts = {}, {}
    for client, held in waiting.items():
        values[client] = None
        if held is not None:
            (upload, weight), part = held, f"{WAITING}-{client}"
            values[client] = {"part": part, "weight": weight, **upload.values.load().values}
            parts[part] = upload.tensors
    return State(values={WAITING: values} if values else {}, parts=Lazy(parts))


def restored_waiting(state: State, store: Store) -> Waiting:
    """Return the uploads of a state to which `waiting_state` was added.

    Args:
        state: The state.
        store: The store to which the uploads are written.
    """
    return {
        client: None if held is None else _restored(held, unread(state.parts), store)
        for client, held in state.values.get(WAITING, {}).items()
    }


def _restored(
    held: Mapping[str, Any], parts: Mapping[str, Any], store: Store
) -> tuple[Upload, float]:
    message = Message(held["exchange"], loaded(parts[held["part"]]).groups, held["values"])
    return Upload.put(store, message), held["weight"]
