"""Servers that are started again: clients that joined later, other settings, finished runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from looped import NAMES, Killed, Notes, kill, steps_to, succeed

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")

from coterie.config.run import RunConfig, parse
from coterie.deployment.forgetting import check_participant, forget
from coterie.deployment.quorum import Quorum
from coterie.deployment.seats import Seat
from coterie.deployment.start import Serving, serve, serve_again
from coterie.errors import CoterieError
from coterie.messages.envelope import Order
from coterie.network.keys import Keys
from coterie.network.link import Link
from coterie.runs import RECEIVED, RunFolder
from coterie.testing.loop import Loop, workers


@dataclass(frozen=True, kw_only=True)
class Looped(Serving):
    """The network of a server whose clients are workers in this process."""

    loop: Loop

    @contextmanager
    def link(self, folder: RunFolder, config: RunConfig) -> Iterator[Link]:
        yield self.loop


def with_deployment(run: RunConfig, **settings: Any) -> RunConfig:
    return run.model_copy(update={"deployment": run.deployment.model_copy(update=settings)})


@pytest.fixture
def loop(config, tmp_path) -> Loop:
    return Loop(workers(config(), tmp_path))


@pytest.fixture
def joined(config, loop, tmp_path) -> tuple[RunConfig, Path]:
    """A run that lists two clients, and that a third has joined; then nobody else may join."""
    run = config(method={"name": "fedavg"}, rounds=4, deployment={"anyone": True, "quorum": 3})
    run = run.model_copy(update={"clients": tuple(c for c in run.clients if c.name != "diarist")})
    out = tmp_path / "server"
    with pytest.raises(Killed):
        serve(run, out, Looped(Notes("round 1/"), loop=loop))
    run = with_deployment(run, anyone=False)
    with pytest.raises(Killed):
        serve_again(out, Looped(Notes("round 2/"), loop=loop), update=run)
    return run, out


def test_a_client_that_joined_later_can_be_expelled_and_forgotten(joined, loop) -> None:
    run, out = joined
    folder = RunFolder(out)
    with pytest.raises(CoterieError, match="has no client 'nobody'"):
        check_participant(folder, "nobody")
    text = succeed("expel", out, "--client", "diarist")
    assert "asks for a quorum of 3, but only 2 clients remain" in text
    assert forget(folder, "diarist").rounds == [1, 2]
    assert b"diarist" not in folder.load("engine").encode()
    assert forget(folder, "diarist").rounds == []
    serve_again(out, Looped(Notes(), loop=loop), update=run)
    assert folder.result is not None
    assert steps_to(loop, "poet") == [0, 1, 2, 3]


def test_the_command_expels_a_client_that_joined_later(joined, values, monkeypatch) -> None:
    _, out = joined
    keys, file = out.parent / "keys", out.parent / "run.yaml"
    clients = [{"name": "poet"}, {"name": "whaler"}]
    run = values(method="fedavg", rounds=4, clients=clients, deployment={"quorum": 3})
    file.write_text(yaml.safe_dump(run))
    Keys.create(keys).add("poet", out.parent / "poet.key")
    monkeypatch.setattr("coterie.deployment.start._run_to_end", lambda folder, *_: folder)
    options = ("--keys", keys, "--out", out, "--resume", "--from-round", 1, "--without", "diarist")
    assert "whaler has no key; create one with `coterie keys add" in succeed(
        "server", file, *options
    )
    assert (RunFolder(out).turns(), RunFolder(out).expelled()) == (1, {"diarist"})


def test_expelling_a_name_that_nobody_has_says_so(joined, loop) -> None:
    run, out = joined
    with pytest.raises(Killed):
        serve_again(
            out, Looped(Notes("round 3/"), loop=loop), update=with_deployment(run, anyone=True)
        )
    text = succeed("expel", out, "--client", "diarists")
    assert "No client called diarists has joined this run so far; check the name." in text
    assert "No client called" not in succeed("expel", out, "--client", "diarist")


def test_a_run_goes_on_with_the_client_that_joined_later(joined, loop) -> None:
    run, out = joined
    without = ["poet", "whaler"]
    finished = serve_again(out, Looped(Notes(), loop=loop), without=without, update=run)
    assert finished.result is not None
    assert steps_to(loop, "diarist") == [0, 1, 2, 3]


def test_the_last_quorum_is_the_one_that_an_expulsion_lowers(joined, loop) -> None:
    run, out = joined
    update = with_deployment(run, quorum=2)
    with pytest.raises(Killed):
        serve_again(out, Looped(Notes("round 3/"), loop=loop), update=update)
    assert "quorum of" not in succeed("expel", out, "--client", "diarist")
    assert RunFolder(out).description["config"]["deployment"]["quorum"] == 2


def test_clients_that_joined_later_count_towards_the_quorum(joined) -> None:
    run, _ = joined
    seats = {name: Seat(present="1", joined=True) for name in ("poet", "whaler")}
    quorum = Quorum(run, seats | {"diarist": Seat()})
    assert quorum.needed == 3
    assert quorum.missing() == "diarist"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rounds": 14}, "rounds (4, now 14)"),
        ({"training": {"steps": 7}}, "training.steps ("),
        ({"method": {"name": "local"}}, 'method.name ("fedavg", now "local")'),
        ({"seed": 5}, "seed ("),
        ({"name": "other"}, "name ("),
        ({"deployment": {"share_metrics": True}}, "deployment.share_metrics (false, now true)"),
        ({"clients": ("poet", "whaler", "carol")}, "clients (carol is not part of the run)"),
        ({"clients": ("poet",)}, "clients (whaler is missing; expel it with --without whaler)"),
        ({"clients": ("diarist", "poet", "whaler")}, ""),
        ({"deployment": {"quorum": 2, "deadline": 5, "checkpoints": 9}}, ""),
        ({"device": "cpu"}, ""),
    ],
)
def test_settings_that_cannot_change_are_refused(change, text, joined, monkeypatch) -> None:
    run, out = joined
    monkeypatch.setattr("coterie.deployment.start._run_to_end", lambda folder, *_: folder)
    values = run.as_dict() | {"clients": [{"name": n, "path": "-"} for n in ("poet", "whaler")]}
    for key, value in change.items():
        if key == "clients":
            values[key] = [{"name": name, "path": "-"} for name in value]
        else:
            is_section = isinstance(value, dict)
            values[key] = values[key] | value if is_section and key != "method" else value
    update, serving = parse(values), Looped(Notes(), loop=Loop({}))
    if not text:
        assert serve_again(out, serving, update=update).path == out
        return
    with pytest.raises(CoterieError, match="cannot change when a run is resumed") as raised:
        serve_again(out, serving, update=update)
    assert text in str(raised.value)


def test_a_finished_run_ends_at_once_when_it_is_resumed(config, loop, tmp_path) -> None:
    run, watch = config(method={"name": "fedavg"}, rounds=2), Notes()
    folder = serve(run, tmp_path / "server", Looped(watch, loop=loop))
    loop.away, turns, result = set(NAMES), loop.turns, folder.result
    for _ in range(2):
        serve_again(folder.path, Looped(watch, loop=loop), update=run)
        assert loop.turns == turns
        assert folder.result == result
        assert "The run has ended" in succeed("status", folder.path)
    assert not [note for note in watch.lines if "did not receive" in note]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, None])
def test_clients_without_a_result_are_awaited(stop, config, loop, tmp_path, monkeypatch) -> None:
    """End the server by itself or with Ctrl-C while the whaler is away; the whaler then returns."""
    monkeypatch.setattr("coterie.deployment.server.GRACE", 0.5 if stop is None else 60.0)
    run = config(method={"name": "fedavg"}, rounds=1, deployment={"deadline": 0.5})
    out = tmp_path / "server"

    def leave(name: str, order: Order) -> bool:
        if (name, order.kind) == ("whaler", "finish"):
            loop.away |= {*NAMES}
            loop.events = {loop.turns + 5: end}
        return (name, order.kind) == ("whaler", "finish")

    def end(_: Loop) -> None:
        if stop is not None:
            raise stop
        time.sleep(0.6)

    loop.lose = leave
    with pytest.raises(stop) if stop else nullcontext():
        serve(run, out, Looped(Notes(), loop=loop))
    loop.lose = lambda *_: False
    watch = Notes()
    loop.events = {loop.turns + 5: end}
    with pytest.raises(stop) if stop else nullcontext():
        serve_again(out, Looped(watch, loop=loop), update=run)
    if stop is None:
        missing = [note for note in watch.lines if "did not receive" in note]
        assert missing == [
            "whaler did not receive the result; use --resume when whaler is connected"
        ]
        succeed("status", out)
    loop.events = {loop.turns + 5: lambda loop: loop.reconnect("whaler")}
    watch = Notes()
    assert serve_again(out, Looped(watch, loop=loop), update=run).result is not None
    assert not [note for note in watch.lines if "did not receive" in note]


def test_a_run_stays_complete_while_a_client_is_awaited(config, loop, tmp_path) -> None:
    run = config(method={"name": "fedavg"}, rounds=1)
    folder = serve(run, tmp_path / "server", Looped(Notes(), loop=loop))
    folder.write_list(RECEIVED, ["diarist"])
    loop.away, loop.events = {*NAMES}, {loop.turns + 3: kill}
    with pytest.raises(Killed):
        serve_again(folder.path, Looped(Notes(), loop=loop), update=run)
    succeed("status", folder.path)


def test_the_list_of_received_results_is_kept_up_to_date(config, loop, tmp_path) -> None:
    run = config(method={"name": "fedavg"}, rounds=2, deployment={"checkpoints": 3})
    folder = serve(run, tmp_path / "server", Looped(Notes(), loop=loop))
    assert folder.listed(RECEIVED) == {*NAMES}
    forget(folder, "poet")
    assert folder.listed(RECEIVED) == {"diarist", "whaler"}
    folder.go_back(folder.turns())
    assert folder.listed(RECEIVED) == set()
