"""The example transforms in whole runs: every engine, killed and resumed, gives the same bits."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import coterie
from coterie.config.plugins import load_plugin
from coterie.deployment.client import Worker
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.messages import Message, Schema
from coterie.messages.envelope import Reply, seal, unseal
from coterie.privacy import secrets
from coterie.runs import Callback, RunFolder
from coterie.testing.loop import Loop, assert_as_local, assert_same_states, deploy, server, site
from coterie.testing.loop import workers as clients_of
from coterie.transforms.contract import Transform, TransformFacts

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
TRANSFORMS: dict[str, Any] = {
    "median": "median",
    "trimmed mean": {"name": "trimmed_mean", "trim": 0.3},
    "my median": "my_median",
    "noise": {"name": "clipped_gaussian", "epsilon": 1e4},
    "int8": "int8",
    "masks": "masked_sum",
    "three": [{"name": "clipped_gaussian", "epsilon": 1e4}, "int8", "my_median"],
}
"""`aggregation.transforms` of a run."""


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    for file in sorted(EXAMPLES.glob("*.py")):
        load_plugin(file)
    for kind in (Failing, Phased, Trained):
        coterie.register(kind)


@pytest.fixture(autouse=True)
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and keys differ from run to run; here they do not."""
    monkeypatch.setattr(secrets, "draw", lambda: bytes(secrets.KEY_BYTES))


@pytest.fixture(params=TRANSFORMS)
def run(request: pytest.FixtureRequest, config: Any) -> coterie.RunConfig:
    chosen = TRANSFORMS[request.param]
    transforms = chosen if isinstance(chosen, list) else [chosen]
    return config(
        rounds=2,
        evaluation={"every": 1},
        deployment={"quorum": 3, "deadline": 60},
        aggregation={"transforms": transforms, "largest_change": None},
    )


class Stop(Callback):
    """Interrupts a run after its first round."""

    def on_round_end(self, round: int, scores: str) -> None:
        raise KeyboardInterrupt


class Killed(Exception):
    """The server's process ends."""


def kill(loop: Loop) -> None:
    raise Killed


def test_every_engine_ends_in_the_same_bits_killed_or_not(run, tmp_path) -> None:
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    session = Session(run)
    description = session.description(run, session.participants(run))
    stopped = RunFolder.create(tmp_path / "stopped", description)
    with pytest.raises(KeyboardInterrupt):
        session.start(run, stopped, [Stop()]).run()
    coterie.resume(stopped.path)
    assert_same_states(stopped, local)

    def killed(loop: Loop) -> None:
        loop.reconnect("poet", Worker(site(run, "poet", tmp_path)))

    clients = clients_of(run, tmp_path)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", Loop(clients, {3: kill})).rounds()
    server(run, tmp_path / "server", Loop(clients, {2: killed})).rounds()
    assert_as_local(run, tmp_path, local)


@pytest.mark.parametrize(("transform", "round"), [("int8", 1), ("masked_sum", 0)])
def test_whoever_is_not_asked_again_counts_as_in_the_first_attempt(
    transform, round, config, tmp_path, monkeypatch
) -> None:
    """One reply is spoilt, so that the exchange begins again with the uploads of the others."""
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    run = config(
        rounds=2,
        deployment={"quorum": 3, "deadline": 60},
        aggregation={"transforms": [transform], "largest_change": None},
    )
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    spoilt: list[str] = []

    def spoil(name: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        if (name, reply.kind, reply.turn) != ("poet", "step", round) or spoilt:
            return data
        spoilt.append(name)
        message = Message.decode(body)
        groups = {
            g: {n: t.flatten()[:1] for n, t in ts.items()} for g, ts in message.groups.items()
        }
        return seal(reply, Message(message.exchange, groups).encode())

    deploy(run, tmp_path, change=spoil)
    assert spoilt
    assert_as_local(run, tmp_path, local)


class Phased(Transform):
    name: ClassVar[str] = "phased"
    summary: ClassVar[str] = "has a phase of a name that another has, too"
    before: ClassVar[tuple[str, ...]] = ("keys",)


class Trained(Transform):
    name: ClassVar[str] = "trained"
    summary: ClassVar[str] = "has a phase of the name of training"
    before: ClassVar[tuple[str, ...]] = ("train",)


class Failing(Transform):
    name: ClassVar[str] = "failing"
    summary: ClassVar[str] = "fails before the run"

    hook: str = "check"

    def schema(self, schema: Schema) -> Schema:
        return self._failed("schema") or super().schema(schema)

    def check(self, run: TransformFacts) -> None:
        self._failed("check")

    def _failed(self, hook: str) -> Any:
        if self.hook == hook:
            raise KeyError("epsilon")


def test_a_client_without_its_state_cannot_read_differences(config, tmp_path) -> None:
    run = config(
        rounds=3,
        deployment={"quorum": 3, "deadline": 60},
        aggregation={"transforms": ["int8"], "largest_change": None},
    )
    seen: list[Any] = []

    def wipe(loop: Loop) -> None:
        worker = Worker(site(run, "poet", tmp_path / "anew"), seen=lambda *what: seen.append(what))
        loop.reconnect("poet", worker)

    with pytest.raises(Killed):
        deploy(run, tmp_path, events={4: wipe, 8: kill})
    [why, *_] = [what[1] for what in seen if what[0] == "fault"]
    assert "round 1 is missing, but each download of this run contains only the diff" in why


def test_bytes_on_the_wire_are_what_transforms_declare(config, tmp_path) -> None:
    def traffic(*transforms: Any) -> dict[str, int]:
        run = config(rounds=2, aggregation={"transforms": list(transforms)})
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        result = RunFolder(coterie.run(run, out=out).path).result
        assert result is not None
        return result["traffic"]

    plain, small = traffic(), traffic("int8")
    assert traffic("median") == plain
    assert small["up"] < plain["up"]
    assert small["down"] < plain["down"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"transforms": ["median", "trimmed_mean"]}, "several transforms that replace the mean"),
        ({"transforms": ["int8", "median", "int8"]}, "has 'int8' twice; keep one of them"),
        ({"transforms": ["median", "median"]}, "has 'median' twice"),
        ({"transforms": ["bounds"]}, r"no transform 'bounds'\. Bounds, .* keys of the section"),
        ({"transforms": ["masked_sum", "phased"]}, "Two phases have the name 'keys'"),
        ({"transforms": ["trained"]}, "Two phases have the name 'train'.* rename the phase"),
        ({"transforms": ["failing"]}, "The transform 'failing' failed: check raised KeyError"),
        (
            {"transforms": [{"name": "failing", "hook": "schema"}]},
            "The transform 'failing' failed: schema raised KeyError: 'epsilon'",
        ),
        ({"transforms": ["medain"]}, "There is no transform 'medain'. Did you mean 'median'?"),
        ({"transforms": [{"name": "trimmed_mean", "trim": 0.7}]}, r"transforms\[0\].trim"),
        ({"transforms": [{"name": "median", "trim": 0.2}]}, r"Unknown key .*transforms\[0\].trim"),
    ],
)
def test_what_cannot_be_is_refused(changes, why, config) -> None:
    def checked() -> None:
        run = config(aggregation=changes)
        Session(run).check(run)

    with pytest.raises(CoterieError, match=why):
        checked()


@pytest.mark.parametrize(
    ("method", "transform", "why"),
    [
        ("local", "median", "has no effect with the method 'local'"),
        ("pcl-2", "clipped_gaussian", "encodes. Remove it"),
        ("fedamole", "masked_sum", "also uploads 'tokens' \\(mean token embedding"),
        (
            {"name": "fedavg", "exact": True},
            "median",
            "method.exact needs the mean of uploads, which",
        ),
    ],
)
def test_a_method_that_a_transform_cannot_have_is_refused(method, transform, why, config) -> None:
    run = config(method=method, aggregation={"transforms": [transform]})
    with pytest.raises(CoterieError, match=why):
        Session(run).check(run)


def test_median_and_trimmed_mean_are_their_definitions() -> None:
    from coterie.transforms.contract import Contribution, Memory
    from coterie.transforms.reductions import Median, TrimmedMean

    rows = torch.randn(7, 9)
    stream = [Contribution(str(i), {"g": {"x": row}}) for i, row in enumerate(rows)]
    found = Median().reduce(stream, (), Memory())["g"]["x"]
    torch.testing.assert_close(found, torch.tensor([sorted(c)[3] for c in rows.T.tolist()]))
    found = TrimmedMean(trim=0.3).reduce(stream, (), Memory())["g"]["x"]
    naive = [sum(sorted(column)[2:5]) / 3 for column in rows.T.tolist()]
    torch.testing.assert_close(found, torch.tensor(naive))
