"""Counts of the calls and forward passes of a run, which evaluations must not increase."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunConfig
from coterie.engines import client_host, server_host
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.inference.kept import Keeper
from coterie.runs import RunFolder


class Work:
    """Counts of function calls, and of forward passes outside evaluations.

    The calls are counted separately for each function and client.

    Args:
        patch: Fixture that replaces the functions whose calls are counted.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: Counter[str] = Counter()
        """Counts of function calls and forward passes.

        The key for a function is its name, followed by the client's name, such as `train poet`. The
        key for forward passes is `forward`.
        """
        self.patch, self.scoring, self.scores = patch, False, 0

    def count(self, owner: Any, name: str, label: Callable[[Any], str] = lambda _: "") -> None:
        """Begin to count the calls to a function.

        Args:
            owner: The class, object or module that has the function.
            name: The function's name.
            label: Function that receives the first argument of the counted call. It returns the
                client's name, or an empty string if the call concerns no client.
        """
        function = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            self.done[f"{name} {label(args[0]) if args else ''}".strip()] += 1
            return function(*args, **named)

        self.patch.setattr(owner, name, counted)

    def forward(self, *_: Any) -> None:
        """Count a forward pass, unless a model is being scored."""
        self.done["forward"] += not self.scoring

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Count an evaluation, and do not count the forward passes inside the `with` block."""
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
    """Count the work of a run.

    Args:
        config: The run.
        every: The number of rounds between evaluations; None to evaluate only at the end.
        out: The run folder.
        monkeypatch: Fixture that replaces the functions whose calls are counted.
        also: Function that is called before the run begins. It can begin to count the calls to
            other functions.

    Returns:
        The counts.
    """
    values = {**config.evaluation.model_dump(), "every": every}
    run = config.model_copy(update={"evaluation": type(config.evaluation)(**values)})
    session = Session(run)
    federation = session.federation(run)
    folder = RunFolder.create(out, session.description(run, federation.clients))
    with monkeypatch.context() as patch:
        work = Work(patch)
        local = local_run(run, session.base, federation.clients, folder, own=federation.server)
        for name, side in local.clients.items():
            for step in ("receive", "train", "upload"):
                work.count(side, step, lambda _, name=name: name)
        also(work)
        for owner, name in ((client_host, "scored"), (server_host, "scored"), (Keeper, "_scored")):
            patch.setattr(owner, name, work.evaluation()(getattr(owner, name)))
        bases = [local.clients.host(name).base for name in local.names]
        if federation.server is not None and federation.server.base is not None:
            bases.append(federation.server.base)
        models = {id(base): base.model for base in bases}.values()  # clients may share a base
        hooks = [m.base_model.register_forward_pre_hook(work.forward) for m in models]
        local.run()
        for hook in hooks:
            hook.remove()
    return work
