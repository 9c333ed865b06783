"""The example transforms in whole runs: repeated exchanges, bytes, and refusals."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from looped import Killed, Spoilt, kill, result_of
from test_phases_after import Counted

import coterie
from coterie.config.plugins import load_plugin
from coterie.deployment.client import Worker
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.messages import Message, Schema
from coterie.messages.envelope import Reply, seal
from coterie.privacy import secrets
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_as_local, deploy, site
from coterie.transforms.contract import Transform, TransformFacts

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
"""`aggregation.transforms` of a run."""


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    for file in sorted(EXAMPLES.glob("*.py")):
        load_plugin(file)
    for kind in (Counted, Failing, Phased, Trained):
        coterie.register(kind)


def shortened(reply: Reply, body: bytes) -> bytes:
    """Return a reply with one element of each tensor, and no values."""
    message = Message.decode(body)
    groups = {g: {n: t.flatten()[:1] for n, t in ts.items()} for g, ts in message.groups.items()}
    return seal(reply, Message(message.exchange, groups).encode())


@pytest.mark.parametrize(
    ("transform", "turn"), [("int8", 1), ("masked_sum", 0), ("counted", 0), ("counted", 1)]
)
def test_a_bad_reply_repeats_the_exchange(transform, turn, config, tmp_path, monkeypatch) -> None:
    """Truncate one reply, so that the exchange begins again with the uploads of the others."""
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    monkeypatch.setattr(secrets, "draw", lambda: bytes(secrets.KEY_BYTES))  # noise and keys
    run = config(
        rounds=2,
        deployment={"quorum": 3, "deadline": 60},
        aggregation={"transforms": [transform], "largest_change": None},
    )
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    spoilt = Spoilt(shortened, turn)
    deploy(run, tmp_path, change=spoilt)
    assert spoilt.count
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
        worker = Worker(
            site(run, "poet", tmp_path / "anew"), seen=lambda *event: seen.append(event)
        )
        loop.reconnect("poet", worker)

    with pytest.raises(Killed):
        deploy(run, tmp_path, events={4: wipe, 8: kill})
    [why, *_] = [event[1] for event in seen if event[0] == "fault"]
    assert "round 1 is missing, but each download of this run contains only the diff" in why


def test_bytes_on_the_wire_are_what_transforms_declare(config, tmp_path) -> None:
    def traffic(*transforms: Any) -> dict[str, int]:
        run = config(rounds=2, aggregation={"transforms": list(transforms)})
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return result_of(RunFolder(coterie.run(run, out=out).path))["traffic"]

    plain, small = traffic(), traffic("int8")
    assert traffic("median") == plain
    assert small["up"] < plain["up"]
    assert small["down"] < plain["down"]


SCHEMA = {"name": "failing", "hook": "schema"}
TRIM = {"name": "trimmed_mean", "trim": 0.7}
EXACT = {"name": "fedavg", "exact": True}


@pytest.mark.parametrize(
    ("method", "transforms", "why"),
    [
        (None, ["median", "trimmed_mean"], "several transforms that replace the mean"),
        (None, ["int8", "median", "int8"], "has 'int8' twice; keep one of them"),
        (None, ["median", "median"], "has 'median' twice"),
        (None, ["bounds"], r"no transform 'bounds'\. Bounds, .* keys of the section"),
        (None, ["masked_sum", "phased"], "Two phases have the name 'keys'"),
        (None, ["trained"], "Two phases have the name 'train'.* rename the phase"),
        (None, ["failing"], "The transform 'failing' failed: check raised KeyError"),
        (None, [SCHEMA], "The transform 'failing' failed: schema raised KeyError: 'epsilon'"),
        (None, ["medain"], "There is no transform 'medain'. Did you mean 'median'?"),
        (None, [TRIM], r"transforms\[0\].trim"),
        (None, [{"name": "median", "trim": 0.2}], r"Unknown key .*transforms\[0\].trim"),
        ("local", ["median"], "has no effect with the method 'local'"),
        ("pcl-2", ["clipped_gaussian"], "encodes. Remove it"),
        ("fedamole", ["masked_sum"], "also uploads 'tokens' \\(mean token embedding"),
        (EXACT, ["median"], "method.exact needs the mean of uploads, which"),
    ],
)
def test_what_cannot_be_is_refused(method, transforms, why, config) -> None:
    changes = {} if method is None else {"method": method}
    with pytest.raises(CoterieError, match=why):
        check(config(aggregation={"transforms": transforms}, **changes))


def check(run: coterie.RunConfig) -> None:
    Session(run).check(run)


def test_median_and_trimmed_mean_are_their_definitions() -> None:
    from coterie.transforms.contract import Contribution, Memory
    from coterie.transforms.reductions import Median, TrimmedMean

    rows = torch.randn(7, 9)
    stream = [Contribution(str(i), {"g": {"x": row}}) for i, row in enumerate(rows)]
    mean = Median().reduce(stream, (), Memory())["g"]["x"]
    torch.testing.assert_close(mean, torch.tensor([sorted(c)[3] for c in rows.T.tolist()]))
    mean = TrimmedMean(trim=0.3).reduce(stream, (), Memory())["g"]["x"]
    naive = [sum(sorted(column)[2:5]) / 3 for column in rows.T.tolist()]
    torch.testing.assert_close(mean, torch.tensor(naive))
