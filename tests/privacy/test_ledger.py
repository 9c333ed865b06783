"""A client's ledger: what was told under noise adds up, is never undone, and ends at its limit."""

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from coterie.cli import deploy as deploy_cli
from coterie.config.run import RunConfig, parse
from coterie.deployment.client import Worker
from coterie.deployment.site import Site, ledger_of
from coterie.errors import CoterieError
from coterie.exchanges.codec import ClientTransforms
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import Field, Message, Schema
from coterie.messages.envelope import Order, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.methods.fedamole import client as fedamole
from coterie.privacy.ledger import Budget, Ledger
from coterie.privacy.mechanisms import MOST_EPSILON, epsilon, noise_for, private_mean
from coterie.testing.loop import RUN, deploy, site
from coterie.testing.rounds import down, joined
from coterie.transforms.contract import Context, Transform, mapped
from coterie.turn import Turn

NOISE = noise_for(8.0, 10, 1e-5)


def test_a_run_makes_the_stated_releases_and_repeats_them_for_nothing() -> None:
    ledger = Ledger()
    assert [ledger.spend(str(n), NOISE, 10) for n in range(12)] == [True] * 10 + [False] * 2
    assert ledger.spend("3", NOISE, 10)
    assert ledger.spent(1e-5) == pytest.approx(8.0)
    assert Ledger().spent(1e-5) == 0


class Loud(Transform):
    """Releases every update with noise."""

    name: ClassVar[str] = "loud"
    summary: ClassVar[str] = "much noise"
    private: ClassVar[bool] = True
    multiplier: ClassVar[float] = 2.0

    def encode(self, update: Any, context: Context) -> Any:
        permitted = context.spend(update, self.multiplier, context.exchanges)
        return mapped(update, torch.clone if permitted else torch.zeros_like)


class Quiet(Loud):
    name: ClassVar[str] = "quiet"
    multiplier: ClassVar[float] = 1.0


@pytest.mark.parametrize("transforms", [(Loud(), Quiet()), (Quiet(), Loud())])
def test_each_of_two_transforms_spends_its_own_budget(transforms) -> None:
    field = Field("adapter", "pairs", reduce="mean")
    pipeline = Pipeline(transforms, Schema(up=(field,), down=(field,)), exchanges=4)
    client = ClientTransforms(pipeline, "ada", ledger := Ledger())
    for number in range(4):
        turn = Turn(number, number, number)
        client.receive(Message(number, {"adapter": {"A": torch.zeros(2)}}), turn)
        upload = Message(number, {"adapter": {"A": torch.full((2,), number + 1.0)}})
        assert client.send(upload, turn)["adapter"]["A"].all()
    costs = [float(noise) ** -2 for noise in ledger.runs[""].values()]
    assert sum(costs) == pytest.approx(4 * (2.0**-2 + 1.0**-2))


def test_runs_add_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    for run in ("one", "two"):
        ledger = Ledger(path, run, Budget(20.0, 1e-5))
        assert ledger.affords([Budget(8.0, 1e-5)])
        assert all(ledger.spend(str(n), NOISE, 10) for n in range(10))
    both = epsilon(NOISE, 20, 1e-5)
    assert Ledger(path, "three").spent(1e-5) == pytest.approx(both)
    limit = Budget(1.01 * both, 1e-5)
    third = Ledger(path, "three", limit)
    assert not third.affords([Budget(8.0, 1e-5)])
    assert not third.spend("0", NOISE, 10)
    assert Ledger(path, "two", limit).affords([Budget(8.0, 1e-5)])  # what it goes on with
    assert not Ledger(limit=Budget(20.0, 1e-5)).affords([Budget(math.inf, 1.0)])
    assert not Ledger(limit=Budget(0.0, 1e-5)).spend("0", 1e6, 1)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"run": {"0": "x"}}', '{"run": [1]}', "\xff"])
def test_a_ledger_that_cannot_be_read_is_not_begun_anew(content, tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CoterieError, match="cannot be read"):
        Ledger(path)


def test_two_processes_share_a_ledger(tmp_path: Path) -> None:
    # Each process reads what the other one has spent.
    path, limit = tmp_path / "privacy.json", Budget(8.0, 1e-5)
    first, other = Ledger(path, "one", limit), Ledger(path, "other", limit)
    accepted = [ledger.spend(str(n), NOISE, 10) for n in range(10) for ledger in (first, other)]
    assert sum(accepted) == 10
    assert Ledger(path).spent(1e-5) == pytest.approx(8.0)


@pytest.mark.parametrize("most", [MOST_EPSILON, 1e-3])
def test_the_largest_and_a_small_budget_can_be_computed_with(most) -> None:
    assert epsilon(noise_for(most, 3, 1e-5), 3, 1e-5) == pytest.approx(most, rel=1e-6)
    assert Ledger(limit=Budget(most, 1e-5)).affords([Budget(most, 1e-5)])


@pytest.mark.parametrize("asked", [math.inf, 1e308, math.nan, 0.0])
def test_a_budget_that_says_nothing_is_refused(asked, values) -> None:
    embeddings = {"privacy": {"epsilon": asked}}
    with pytest.raises(CoterieError, match="epsilon"):
        parse(values(method={"name": "fedamole", "embeddings": embeddings}))


def test_without_a_limit_the_budget_is_for_all_runs(private, tmp_path) -> None:
    # A server that begins the run again under another number receives nothing more.
    path = tmp_path / "us.yaml"
    visible = {**private.as_dict(), "clients": [{"name": c.name} for c in private.clients]}
    visible["data"] = {**visible["data"], "public": None}
    path.write_text(yaml.safe_dump(visible))
    agreed, limit = deploy_cli.terms_of(path, "poet", None)
    assert limit is not None
    assert (limit.epsilon, limit.delta) == (8.0, 1e-5)
    assert deploy_cli.terms_of(path, "poet", 3.0)[1] == Budget(3.0, 1e-5)
    assert deploy_cli.terms_of(None, "poet", None) == (None, None)
    ledger = Ledger(tmp_path / "privacy-poet.json", "f" * 16)
    noise = noise_for(8.0, private.rounds, 1e-5)
    assert all(ledger.spend(str(n), noise, private.rounds) for n in range(private.rounds))
    base = site(private, "poet", tmp_path)
    worker = Worker(Site(base.name, base.texts, tmp_path, base.base, None, agreed, limit=limit))
    reply, _ = unseal(Reply, worker.answer(join(private)))
    assert reply.fault == "budget"
    assert "of which 8 is spent" in worker.error


def test_masks_hide_one_upload_in_a_run_and_cost_nothing(tmp_path: Path) -> None:
    # The record outlives the process and the round, and belongs to one run.
    path = tmp_path / "privacy.json"
    assert Ledger(path, "run").spend("noise", NOISE, 1)
    spent = Ledger(path).spent(1e-5)
    for ledger in (Ledger(path, "run"), Ledger(path, "run"), Ledger(path, "other")):
        digest = ("b" if ledger.run == "other" else "a") * 64
        assert ledger.use("masks", digest)
        assert not ledger.use("masks", "c" * 64)
        assert ledger.use("others", digest)
        assert ledger.spent(1e-5) == spent
    path.write_text('{"run": {"masks": "no digest"}}')
    with pytest.raises(CoterieError, match="cannot be read"):
        Ledger(path, "run")


def test_what_cannot_be_written_is_not_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "missing" / "privacy.json")
    for _ in range(2):
        with pytest.raises(CoterieError, match="Could not write"):
            ledger.spend("0", NOISE, 10)


@pytest.fixture
def private(noisy) -> RunConfig:
    return noisy(8.0)


def join(run: RunConfig) -> bytes:
    config = run.visible_to("poet")
    order = Order(run=RUN, client="poet", kind="join", turn=0, protocol=PROTOCOL, config=config)
    return seal(order)


def test_a_round_opened_25_times_spends_no_more(private, tmp_path, monkeypatch) -> None:
    # Each attempt has other experts and is undone; every fifth one is in a new process.
    accepted: list[bool] = []

    def seen(*arguments: Any) -> torch.Tensor:
        accepted.append(True)
        return private_mean(*arguments)

    monkeypatch.setattr(fedamole, "private_mean", seen)
    monkeypatch.setattr("coterie.deployment.orders.MAX_TRAININGS", 25)
    local = joined(private)
    local.open(local.config.turn(0), sorted(local.clients))
    download, schema = down(local, "poet"), private.method.schema()
    place, uploads = site(private, "poet", tmp_path), []
    worker = Worker(place)
    for opening in range(25):
        if opening % 5 == 0:
            worker.close()
            worker = Worker(place)
            assert unseal(Reply, worker.answer(join(private)))[0].fault is None
        adapter = {name: t + opening / 1000 for name, t in download["adapter"].items()}
        changed = Message(0, {"adapter": adapter}, download.values)
        order = Order(run=RUN, client="poet", kind="step", turn=0)
        reply, body = unseal(Reply, worker.answer(seal(order, schema.send("down", changed))))
        assert reply.fault is None
        uploads.append(schema.receive("up", body))
    worker.close()
    assert len(accepted) == private.rounds
    assert ledger_of(place, RUN).spent(1e-5) == pytest.approx(8.0)
    noise = [torch.cat([t.flatten() for t in u["tokens"].values()]) for u in uploads]
    assert all(float(t.std()) > 0.01 for t in noise)
    assert len({tuple(t.tolist()) for t in noise}) == len(noise)


def test_an_undisturbed_run_spends_its_whole_budget(private, tmp_path, monkeypatch) -> None:
    def never(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("nothing but noise was sent")

    monkeypatch.setattr(fedamole, "only_noise", never)
    deploy(private, tmp_path)
    for client in private.clients:
        ledger = ledger_of(site(private, client.name, tmp_path), RUN)
        assert len(ledger.runs[RUN]) == private.rounds
        assert ledger.spent(1e-5) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("limit", "epsilon", "why"),
    [
        (8.0, 8.0, None),
        (7.9, 8.0, "epsilon of 8; this client's limit for all runs is 7.9, of which 0 is spent"),
        (7.9, None, "of this client's samples without noise"),
        (None, None, None),
    ],
)
def test_a_client_takes_part_within_its_own_limit(limit, epsilon, why, noisy, tmp_path) -> None:
    run = noisy(epsilon)
    base = site(run, "poet", tmp_path)
    most = None if limit is None else Budget(limit, 1e-5)
    worker = Worker(Site(base.name, base.texts, base.out, base.base, limit=most))
    reply, _ = unseal(Reply, worker.answer(join(run)))
    assert reply.fault == (None if why is None else "budget")
    assert (why or "") in worker.error
    worker.close()
