"""The command `coterie compare`."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, Settings
from coterie.errors import CoterieError

METHODS: list[str] = ["pretrained", "local", "fedavg", "comigs-1g1s"]
"""What is compared unless the command is told."""
MethodNames = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated method names (see `coterie methods`). Default: {', '.join(METHODS)}."
    ),
]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUES",
        help="Try each method with these values: training.learning_rate=1e-4,5e-4,2e-3. The one "
        "that does best on the validation text, with the first seed, is then scored on the test "
        "text. Repeatable; all combinations are tried.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD", help="Row that the others are compared with. Default: the best."
    ),
]


def compare(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run file (YAML). Default: the built-in demo."),
    ] = None,
    methods: MethodNames = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method.")] = 1,
    tune: Tune = None,
    against: Against = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs. Default: runs/compare-NAME."),
    ] = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Compare methods on the same data and base over several seeds.

    Finished runs are saved and reused: to continue after an interruption, or to add methods or
    seeds, run the command again.

    Examples:

        coterie compare mine.yaml --methods local,fedavg,comigs-1g1s --seeds 3

        coterie compare mine.yaml --tune training.learning_rate=1e-4,5e-4,2e-3
    """
    import coterie
    from coterie.config.read import load_here
    from coterie.config.tune import read_tune
    from coterie.config.values import read_values

    values, trials = read_values(file, settings or ()), read_tune(tune or ())
    if {"rows", "shows"} & values.keys():
        raise CoterieError(f"{file} is a table file; fill it in with `python -m reproduce {file}`.")
    config = load_here(values, trials)
    folder = out or Path("runs") / f"compare-{config.name}"
    with terminal.stoppable():
        comparison = coterie.compare(
            config,
            METHODS if methods is None else listed(methods),
            seeds=seeds,
            tune=trials,
            against=against,
            out=folder,
            watch=terminal.watch,
            report=terminal.say,
        )
    for table in comparison.tables():
        terminal.console.print(table)
    terminal.say(f"\nSaved to {folder}/compare.md and compare.json.")
    terminal.say(
        "To add methods or seeds, run the command again with them; finished runs are reused."
    )


def listed(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]
