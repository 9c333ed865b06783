"""One client's uploads are wrong from beginning to end, with every method: the others' run ends
well, and it says who was left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_method import BEHAVIOURS, FEW, METHODS, marks, run_of

from coterie.config.run import RunConfig
from coterie.exchanges.lazy import server_state
from coterie.exchanges.weights import TOKENS
from coterie.messages import Message
from coterie.messages.envelope import Reply, seal, unseal
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, server, workers

LIAR = "poet"


def wrong(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    """Return a change of all tensors of floats in a message."""

    def changed(message: Message) -> Message:
        groups = {
            group: {n: change(t) if t.is_floating_point() else t for n, t in tensors.items()}
            for group, tensors in message.groups.items()
        }
        return Message(message.exchange, groups, message.values)

    return changed


def heavy(message: Message) -> Message:
    """Report more tokens than there are, in the hello and with every upload."""
    values = {**message.values, TOKENS.name: 2**62}
    changed = values if TOKENS.name in message.values else message.values
    return Message(message.exchange, message.groups, changed)


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))


FAULTS: dict[str, Callable[[Message], Message]] = {
    "x 1e4": wrong(lambda tensor: tensor * 1e4),
    "largest": wrong(lambda tensor: torch.full_like(tensor, torch.finfo(tensor.dtype).max)),
    "nan": wrong(lambda tensor: torch.full_like(tensor, torch.nan)),
    "tokens": heavy,
    "x 3": wrong(lambda tensor: 3 * tensor),
    "x 0.05": wrong(lambda tensor: 0.05 * tensor),
    "x -1": wrong(torch.neg),
    "noise": wrong(noisy),
}
ORDINARY = ("x 3", "x 0.05", "x -1", "noise")
"""Faults whose parameters are of an ordinary size, so only their change tells of them."""
SENDS_PARAMETERS = ("fedavg", "comigs-1g1s", "fedamole", "hetlora, ranks", "pcl-2")
FAST = {("fedavg", fault) for fault in FAULTS} | {("fedamole", "x 3"), ("pcl-2", "x 3")}
SLOW = {(method, "largest") for method in BEHAVIOURS} | {("flexlora", "tokens")}
CASES = [
    pytest.param(method, fault, marks=marks((method, fault), FAST, SLOW))
    for method in METHODS
    for fault in FAULTS
    if (method in SENDS_PARAMETERS and fault in ORDINARY)
    or (method in FEW and fault not in ORDINARY)
    or fault == "largest"
    or (method, fault) == ("flexlora", "tokens")
]
"""Every fault with one method of each kind, and the worst with all."""


def spoiled(run: RunConfig, fault: str, out: Any) -> Loop:
    """Return workers of all clients, one of which damages its replies."""

    def change(name: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        at = ("join", "step") if fault == "tokens" else ("step",)
        if name != LIAR or reply.kind not in at or reply.fault:
            return data
        return seal(reply, FAULTS[fault](Message.decode(body)).encode())

    return Loop(workers(run, out), change=change)


@pytest.mark.parametrize(("method", "fault"), CASES)
def test_wrong_uploads_are_excluded(method, fault, values, teachers, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    changes: dict[str, Any] = {"deployment": {"deadline": 60}}
    if fault == "tokens":
        changes["aggregation"] = {"weights": "tokens"}
    run = run_of(METHODS[method], values, teachers, **changes)
    loop = spoiled(run, fault, tmp_path)
    server(run, tmp_path / "server", loop).rounds()
    folder = RunFolder(tmp_path / "server")
    assert folder.result is not None
    assert server_state(folder).is_finite()
    for name in loop.workers.keys() - {LIAR}:
        worker = loop.workers[name]
        assert worker.finished
        assert worker.run is not None
        assert worker.run.folder.load(f"client-{name}").is_finite()
    schema = server(run, tmp_path / "server", loop).schema
    floats = any(field.dtype != "json" for field in schema.up)
    tokens = TOKENS.name in {field.name for field in schema.hello}
    excluded = tokens if fault == "tokens" else floats
    # Of two uploads, nobody can tell which one is wrong: the larger is scaled down. Predictions
    # with probabilities above 1 are wrong in any case.
    halves = len(run.clients) == 2 and fault == "x 1e4"
    expected = {LIAR} if excluded and not halves else set()
    assert folder.result.get("left_out", {}).keys() == expected
