"""Phases after training: uploads wait on the server, and are aggregated after the last phase."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from looped import Spoilt, result_of

import coterie
from coterie.config.plugins import load_plugin
from coterie.deployment.forgetting import forget
from coterie.errors import CoterieError
from coterie.messages import Groups, Json, MessageError
from coterie.messages.envelope import Order, seal
from coterie.privacy import secrets
from coterie.runs import RunFolder, turn_of
from coterie.testing import loop
from coterie.transforms.contract import Context, Memory, Transform, mapped

MASKED_SUM = Path(__file__).parents[2] / "examples" / "transforms" / "masked_sum.py"
ASK = 1
"""The number of the turn in which the transform `counted` asks its question in the first round."""


class Counted(Transform):
    """After training, each client confirms its upload; the mean is multiplied by their number."""

    name: ClassVar[str] = "counted"
    summary: ClassVar[str] = "the mean times the number of confirmations"
    after: ClassVar[tuple[str, ...]] = ("confirm",)

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        if phase == "train":
            memory.values["confirmed"] = []
        return [*clients]

    def encode(self, update: Groups, context: Context) -> Groups:
        context.memory.values["trained"] = context.turn.number
        return update

    def answer(self, phase: str, context: Context) -> Json:
        assert context.memory.values["trained"] == context.turn.number - 1
        assert context.client in context.server_value
        return context.server_value

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        if not isinstance(answer, list):
            raise MessageError("no names")
        memory.values["confirmed"] = [*memory.values["confirmed"], client]

    def on_mean(self, mean: Groups, before: Groups, memory: Memory) -> Groups:
        return mapped(mean, lambda tensor: len(memory.values["confirmed"]) * tensor)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    load_plugin(MASKED_SUM)
    coterie.register(Counted)


@pytest.fixture(autouse=True)
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and masks differ from run to run; here they do not."""
    monkeypatch.setattr(secrets, "draw", lambda: bytes(secrets.KEY_BYTES))
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)


@pytest.fixture
def run(config) -> Any:
    def make(transform: str = "counted", **changes: Any) -> coterie.RunConfig:
        rules = {"transforms": [transform] if transform else [], "largest_change": None}
        whole = {"rounds": 2, "evaluation": {"every": 1}, "aggregation": rules}
        return config(**{**whole, "deployment": {"quorum": 2, "deadline": 30}, **changes})

    return make


def adapter(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    return loop.flat(RunFolder(folder).load("server"))


def diverges(client: str, turn: int) -> Spoilt:
    """Return a change of replies: a client says that its training diverged."""
    fault = {"fault": "diverged"}
    return Spoilt(lambda reply, _: seal(reply.model_copy(update=fault), b""), turn, 9, client)


@pytest.mark.parametrize("client", ["diarist", "whaler"])
def test_a_masked_sum_survives_a_missing_upload(client, run, tmp_path) -> None:
    masked, plain = run("masked_sum", rounds=1), run("", rounds=1)
    loop.deploy(masked, tmp_path / "masked", change=diverges(client, 1))
    loop.deploy(plain, tmp_path / "plain", change=diverges(client, 0))
    actual, expected = (adapter(tmp_path / name / "server") for name in ("masked", "plain"))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)
    assert [*result_of(RunFolder(tmp_path / "masked" / "server"))["left_out"]] == [client]


def test_an_upload_counts_without_an_answer(run, tmp_path) -> None:
    """Check that a client without an answer takes part in the next round."""
    two = run(deployment={"quorum": 2, "deadline": 1})
    lost = {("whaler", ASK)}

    def lose(name: str, order: Order) -> bool:
        return order.kind == "step" and (name, order.turn) in lost

    waits = dict.fromkeys(range(1000), lambda _: time.sleep(0.01))
    loop.deploy(two, tmp_path, lose=lose, events=waits)
    folder = RunFolder(tmp_path / "server")
    assert "left_out" not in (folder.result or {})
    scored = [
        line["client"]
        for line in loop.folder(two, tmp_path, "whaler").metrics()
        if (line["name"], line["round"]) == ("test/aggregated", 0)
    ]
    assert scored == ["whaler"]
    lines = [line for line in folder.metrics() if line["name"] == "bytes/up"]
    assert sorted(line["client"] for line in lines if turn_of(line) == ASK) == ["diarist", "poet"]


def test_a_client_expelled_after_its_upload_leaves_after_the_exchange(run, tmp_path) -> None:
    """Check that the masked sum still contains the upload, and that the next exchange does not."""
    server, names = tmp_path / "server", []

    def expel(name: str, order: Order) -> bool:
        if order.kind == "step" and order.turn == ASK and not names:
            names.append("whaler")
            RunFolder(server).expel("whaler")
        return False

    loop.deploy(run(), tmp_path, lose=expel)
    assert names
    lines = [line for line in RunFolder(server).metrics() if line["name"] == "bytes/up"]
    assert [turn_of(line) for line in lines if line["client"] == "whaler"] in ([0], [0, 1])
    assert "left_out" not in (RunFolder(server).result or {})
    assert "whaler" not in str(RunFolder(server).load("transforms").values)


def stopped(two: coterie.RunConfig, out: Path) -> loop.Loop:
    """Return a deployment whose server has stopped while uploads wait."""

    def stop(name: str, order: Order) -> bool:
        if order.kind == "step" and order.turn == ASK:
            raise KeyboardInterrupt
        return False

    network = loop.Loop(loop.workers(two, out), lose=stop)
    with pytest.raises(KeyboardInterrupt):
        loop.server(two, out / "server", network).rounds()
    waiting = {f"server-waiting uploads-{client.name}" for client in two.clients}
    assert waiting <= {*loop.sides(RunFolder(out / "server"))}
    network.lose = lambda *_: False
    for name in network.workers:
        network.reconnect(name)
    return network


def test_a_client_is_forgotten_when_its_upload_no_longer_waits(run, tmp_path) -> None:
    two, out = run(deployment={"quorum": 3}), tmp_path / "server"
    network = stopped(two, tmp_path)
    with pytest.raises(CoterieError, match="An upload of poet waits for the end of an exchange"):
        forget(RunFolder(out), "poet")
    assert not RunFolder(out).expelled()
    loop.server(two, out, network).rounds()
    assert forget(RunFolder(out), "poet").rounds == [1, 2]


def test_a_server_that_starts_again_has_no_upload_of_whoever_is_expelled(run, tmp_path) -> None:
    two, out = run(deployment={"quorum": 2}), tmp_path / "server"
    network = stopped(two, tmp_path)
    RunFolder(out).expel("whaler")
    loop.server(two, out, network).rounds()
    assert RunFolder(out).result is not None
    assert "whaler" not in str(RunFolder(out).load("transforms"))


def test_a_server_does_not_wait_for_answers_that_nobody_can_give(run, tmp_path) -> None:
    two, out = run(deployment={"quorum": 1}), tmp_path / "server"
    network = loop.Loop(loop.workers(two, tmp_path), away={"diarist", "poet"})

    def expel(name: str, order: Order) -> bool:
        if order.kind == "step" and order.turn == ASK:
            network.away.clear()
            RunFolder(out).expel("whaler")
            return True
        return False

    network.lose = expel
    with pytest.raises(CoterieError, match=r"All clients whose uploads wait .* have been expelled"):
        loop.server(two, out, network).rounds()


def test_a_masked_sum_refuses_what_it_cannot_hide(run, tmp_path) -> None:
    """Exclude a client without a key for this exchange, and end the run at a single upload."""
    two = run("masked_sum", deployment={"quorum": 2, "deadline": 1})
    waits = dict.fromkeys(range(1000), lambda _: time.sleep(0.01))

    def lose(name: str, order: Order) -> bool:
        return (name, order.kind, order.turn) == ("whaler", "step", two.turns_in(1))

    loop.deploy(two, tmp_path / "key", lose=lose, events=waits)
    assert all(tensor.abs().max() < 10 for tensor in adapter(tmp_path / "key" / "server").values())

    def change(name: str, data: bytes) -> bytes:
        return diverges(name, 1)(name, data) if name != "poet" else data

    with pytest.raises(CoterieError, match="masked_sum needs uploads of at least 2 clients"):
        loop.deploy(two, tmp_path / "one", change=change)
