"""No method works more for being evaluated, and none knows how often it is."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from every_method import METHODS, each_method, run_of

from coterie.config import RunConfig
from coterie.engines import part
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.methods.distillation import Distiller
from coterie.methods.fdlora import FDLoraClient
from coterie.runs import RunFolder, Watch
from coterie.training.update import Updater

ROUNDS = 3


class Work:
    """Counts what a run does, by what it is and whose; forward passes of an evaluation do not
    count."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: Counter[str] = Counter()
        self.patch, self.scoring, self.scores = patch, False, 0

    def count(self, owner: Any, name: str, whose: Callable[[Any], str] = lambda _: "") -> None:
        """From now on count the calls of a method of a class, or of an object."""
        function = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            self.done[f"{name} {whose(args[0]) if args else ''}".strip()] += 1
            return function(*args, **named)

        self.patch.setattr(owner, name, counted)

    def forward(self, *_: Any) -> None:
        """A base is asked something."""
        self.done["forward"] += not self.scoring

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self.scoring, self.scores = True, self.scores + 1
        yield
        self.scoring = False


def worked(
    config: RunConfig, every: int | None, out: Path, monkeypatch: pytest.MonkeyPatch
) -> Work:
    """What a whole run does when it is evaluated every so many rounds."""
    values = {**config.evaluation.model_dump(), "every": every}
    run = config.model_copy(update={"evaluation": type(config.evaluation)(**values)})
    session = Session(run)
    who = session.federation(run)
    folder = RunFolder.create(out, session.description(run, who.clients))
    with monkeypatch.context() as patch:
        work = Work(patch)
        local = LocalRun(run, session.base, who.clients, folder, Watch(), who.server)
        for name, side in local.clients.items():
            for step in ("take", "train", "upload"):
                work.count(side, step, lambda _, name=name: name)
        work.count(Updater, "update", lambda updater: updater.context.name)
        work.count(FDLoraClient, "_fuse", lambda client: client.context.name)
        work.count(Distiller, "distil", lambda distiller: distiller.context.name)
        if hasattr(run.method, "row"):
            work.count(type(run.method), "row")
        scored = part._scored

        def scores(*args: Any) -> Any:
            with work.evaluation():
                return scored(*args)

        patch.setattr(part, "_scored", scores)
        bases = {id(one.base): one.base.model for one in local.parts.values()}
        if who.server is not None and who.server.base is not None:
            bases[id(who.server.base)] = who.server.base.model
        hooks = [b.base_model.register_forward_pre_hook(work.forward) for b in bases.values()]
        local.run()
        for hook in hooks:
            hook.remove()
    return work


@pytest.mark.parametrize("method", each_method(("fedavg", "fdlora", "pcl-2", "fedmkt")))
def test_no_method_works_more_for_being_evaluated(
    method: dict[str, Any],
    values: Callable[..., dict[str, Any]],
    teachers: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(method, values, teachers, rounds=ROUNDS)
    often = worked(run, 1, tmp_path / "often", monkeypatch)
    never = worked(run, None, tmp_path / "never", monkeypatch)
    assert often.done == never.done
    assert often.scores > never.scores
    takes = ROUNDS + bool(run.method.schema().down)
    for client in run.clients:
        assert never.done[f"take {client.name}"] == takes
        assert never.done[f"train {client.name}"] == ROUNDS
        assert never.done[f"upload {client.name}"] == ROUNDS
        assert bool(never.done[f"update {client.name}"]) == (run.method.name != "pretrained")
    assert never.done["forward"] >= sum(n for k, n in never.done.items() if k.startswith("update"))


def test_clients_distil_once_for_each_word_of_the_server(teachers, tmp_path, monkeypatch) -> None:
    for name in ("fedmkt", "fedmkt-fedavg", "llm2slm"):
        run = teachers(method={"name": name}, rounds=3)
        done = worked(run, 1, tmp_path / name, monkeypatch).done
        # Before the first round the server tells nothing: the takes of rounds 2, 3 and the last.
        assert [done[f"distil {client}"] for client in ("diarist", "poet")] == [3, 3]
        assert done["distil server"] == (0 if name == "llm2slm" else 3)


def test_weights_are_searched_once_a_round_and_once_at_the_end(config, tmp_path, monkeypatch):
    clients = [{"name": name, "path": f"{name}.txt"} for name in ("diarist", "poet")]
    run = config(method="fdlora", rounds=3, clients=clients)
    done = worked(run, 1, tmp_path / "run", monkeypatch).done
    assert [done[f"_fuse {client}"] for client in ("diarist", "poet")] == [4, 4]


@pytest.mark.slow
def test_trust_is_measured_once_for_each_exchange(values, teachers, tmp_path, monkeypatch) -> None:
    for name in ("pcl-1", "pcl-2", "pcl-3", "pcl-uniform", "pcl-theoretical"):
        run = run_of(METHODS[name], values, teachers, rounds=3)
        done = worked(run, 1, tmp_path / name, monkeypatch).done
        assert done["row"] == 3 * 3  # three exchanges of three clients
