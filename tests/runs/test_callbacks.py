"""Callbacks: which hooks are called, in which order, with which values."""

from typing import Any

import pytest

import coterie
from coterie import Callback
from coterie.runs import RunFolder, RunStart

NAMES = ("diarist", "poet", "whaler")


class Noted(Callback):
    """Notes every call but those of metrics, which it notes apart."""

    def __init__(self, stop: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.metrics: list[dict[str, Any]] = []
        self.stop = stop

    def on_run_begin(self, run: RunStart) -> None:
        self.calls.append(("begin", run.method, run.rounds, run.done, run.clients))
        assert run.tokens > 0

    def on_metric(self, round: int, client: str | None, name: str, value: Any) -> None:
        self.metrics.append({"round": round, "client": client, "name": name, "value": value})

    def on_client_end(self, round: int, client: str) -> None:
        self.calls.append(("client", round, client))

    def on_round_end(self, round: int, scores: str) -> None:
        self.calls.append(("round", round, scores.split(" ")[0]))
        if round == self.stop:
            raise KeyboardInterrupt

    def on_run_end(self, error: BaseException | None) -> None:
        self.calls.append(("end", error and type(error)))


def rounds(*numbers: int) -> list[tuple[Any, ...]]:
    """Return the calls of some rounds of three, of which the last is scored."""
    return [
        call
        for round in numbers
        for call in (
            *(("client", round, name) for name in NAMES),
            ("round", round, "test" if round == 2 else ""),
        )
    ]


def lines(path: Any) -> list[dict[str, Any]]:
    """Return what metrics.jsonl says."""
    keys = ("round", "client", "name", "value")
    return [{key: line[key] for key in keys} for line in RunFolder(path).metrics()]


def test_one_object_follows_the_baselines_and_the_run(config, tmp_path) -> None:
    noted, second = Noted(), Noted()
    done = coterie.run(config(baselines=["local"]), out=tmp_path / "run", callbacks=[noted, second])
    assert noted.calls == [
        call
        for method in ("local", "comigs-1g1s")
        for call in (("begin", method, 3, 0, NAMES), *rounds(0, 1, 2), ("end", None))
    ]
    assert second.calls == noted.calls
    assert noted.metrics == [*lines(done.path / "baselines" / "local"), *lines(done.path)]
    again = Noted()
    coterie.resume(done.path, callbacks=[again])
    assert again.calls == []


def test_a_hook_stops_a_run_which_then_continues(config, tmp_path) -> None:
    noted, second = Noted(stop=0), Noted()
    with pytest.raises(KeyboardInterrupt):
        coterie.run(config(), out=tmp_path / "run", callbacks=[noted, second])
    begin = ("begin", "comigs-1g1s", 3, 0, NAMES)
    assert noted.calls == [begin, *rounds(0), ("end", KeyboardInterrupt)]
    assert second.calls == [begin, *rounds(0)[:-1], ("end", KeyboardInterrupt)]
    assert RunFolder(tmp_path / "run").turns() == 1
    rest = Noted()
    coterie.resume(tmp_path / "run", callbacks=[rest])
    assert rest.calls == [("begin", "comigs-1g1s", 3, 1, NAMES), *rounds(1, 2), ("end", None)]
    assert noted.metrics + rest.metrics == lines(tmp_path / "run")


def test_a_comparison_is_followed_run_by_run(config, tmp_path) -> None:
    noted = Noted()
    coterie.compare(config(rounds=1), ["local", "fedavg"], seeds=2, out=tmp_path, callbacks=[noted])
    assert [call[1] for call in noted.calls if call[0] == "begin"] == ["local", "fedavg"] * 2
