"""What a run does, counted: work that an evaluation must not add to."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunConfig
from coterie.engines import runtime, server_part
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.inference.kept import Keeper
from coterie.runs import RunFolder


class Work:
    """Counts calls, by what is called and for whom, and bases' forward passes but for those of an
    evaluation."""

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
        """Within the block, a model is scored."""
        self.scoring, self.scores = True, self.scores + 1
        yield
        self.scoring = False


def worked(
    config: RunConfig,
    every: int | None,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    also: Callable[[Work], None] = lambda work: None,
) -> Work:
    """What a whole run does when it is evaluated every so many rounds (None: at the end alone).

    `also` may count more.
    """
    values = {**config.evaluation.model_dump(), "every": every}
    run = config.model_copy(update={"evaluation": type(config.evaluation)(**values)})
    session = Session(run)
    who = session.federation(run)
    folder = RunFolder.create(out, session.description(run, who.clients))
    with monkeypatch.context() as patch:
        work = Work(patch)
        local = local_run(run, session.base, who.clients, folder, own=who.server)
        for name, side in local.clients.items():
            for step in ("receive", "train", "upload"):
                work.count(side, step, lambda _, name=name: name)
        also(work)
        for owner, name in ((runtime, "scored"), (server_part, "scored"), (Keeper, "_scored")):
            patch.setattr(owner, name, work.evaluation()(getattr(owner, name)))
        bases = {id(one.base): one.base.model for one in map(local.clients.part, local.names)}
        if who.server is not None and who.server.base is not None:
            bases[id(who.server.base)] = who.server.base.model
        hooks = [b.base_model.register_forward_pre_hook(work.forward) for b in bases.values()]
        local.run()
        for hook in hooks:
            hook.remove()
    return work
