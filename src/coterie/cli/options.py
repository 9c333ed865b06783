"""Arguments and options that several commands take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from coterie.errors import CoterieError

debug = False
"""Whether errors are to be shown with their traceback."""


def _remember_debug(context: typer.Context, option: typer.CallbackParam, value: bool) -> None:
    global debug
    debug = value


def _load(context: typer.Context, option: typer.CallbackParam, files: Sequence[str]) -> None:
    if files:
        from coterie.config.plugins import load_plugin

        for file in files:
            load_plugin(file)


class Command(TyperCommand):
    """A command that takes --plugin and --debug beside its own options."""

    def __init__(self, *, params: Sequence[Any], **named: Any) -> None:
        plugin = TyperOption(
            param_decls=["--plugin"],
            metavar="FILE.py",
            multiple=True,
            callback=_load,
            expose_value=False,
            help="Register the methods and metrics defined in this Python file. Repeatable.",
        )
        traceback = TyperOption(
            param_decls=["--debug"],
            is_flag=True,
            default=False,
            callback=_remember_debug,
            expose_value=False,
            help="Show the full traceback of an error.",
        )
        super().__init__(params=[*params, plugin, traceback], **named)


def check_run(folder: Path) -> None:
    """Say at once that a folder holds no run: to look closer, torch is imported."""
    if not folder.exists():
        raise CoterieError(f"There is no folder {folder}.")
    if not (folder / "run.json").is_file():
        raise CoterieError(f"{folder} is not a run folder (it has no run.json).")


def device_of(text: str) -> str | list[str]:
    """What --device says, as in a run file."""
    return text.split(",") if "," in text else text


def listed(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def needs_resume(from_round: int | None) -> None:
    """Raise CoterieError for --from-round where no run is resumed."""
    if from_round is not None:
        raise CoterieError("--from-round goes back in a run that is resumed; give --resume, too.")


RunFile = Annotated[
    Path | None,
    typer.Argument(
        help="A run file (YAML). Default: the built-in demo. Other built-in demos: "
        "`who-wrote-this` on instructions, `four-assistants` on conversations, and "
        "`teach-one-another` with a model of the server's own."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where the base is computed: auto (a GPU if there is one), cpu, cuda, cuda:N, mps, or "
        "GPUs to spread it over, such as cuda:0,cuda:1."
    ),
]
ServersDevice = Annotated[
    str | None,
    typer.Option(
        help="Where the server's own model is computed; as `device` of the run file, which it "
        "overrides."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key of the run file: training.batch=4. Repeatable."),
]
FromRound = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --resume: go back to the state after N rounds, if it is kept.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/NAME.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")]
SamplingSeed = Annotated[int, typer.Option(min=0, help="Sampling seed.")]
