"""Runs of methods whose parameters become NaN in some rounds of some clients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from every_method import METHODS, run_of

import coterie
from coterie.config.plugins import load_plugin

WHO = "poet"
ROUND = 1
PLUGIN = """
import torch
from coterie.methods.registry import available

class Broken(available()[{base!r}]):
    name = "broken"

    def client(self, context):
        side = super().client(context)
        train = side.train

        def broken(turn):
            if {last}:
                train(turn)
            if (context.name, turn.round) in {when}:
                for part in side.parameters().values():
                    part.tensor.data.fill_(torch.nan)
            if not {last}:
                train(turn)

        side.train = broken
        return side
"""


def broken(values: Callable[..., Any], teachers: Callable[..., Any], folder: Path) -> Any:
    """Return a function that makes a run of a method in which parameters become NaN."""

    def make(
        method: str = "fedavg",
        when: set[tuple[str, int]] | None = None,
        last: bool = False,
        **changes: Any,
    ) -> coterie.RunConfig:
        """Make a run; `last` means after the training of the clients and rounds in `when`."""
        settings, file = METHODS[method], folder / "broken.py"
        run = run_of(
            settings, values, teachers, **{"rounds": 3, "evaluation": {"every": 1}} | changes
        )
        when = {(WHO, ROUND)} if when is None else when
        file.write_text(PLUGIN.format(base=settings["name"], when=when, last=last))
        [kind] = load_plugin(file)
        return run.model_copy(update={"method": kind(**run.method.model_dump())})

    return make
