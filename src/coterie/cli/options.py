"""Arguments and options that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, CallbackParam, Context, Option, Typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from coterie.cli.terminal import complain
from coterie.errors import CoterieError

debug = False
"""Whether errors are shown with their traceback."""


def _remember_debug(context: Context, option: CallbackParam, value: bool) -> None:
    global debug
    debug = value


def _load(context: Context, option: CallbackParam, files: Sequence[str]) -> None:
    if files:
        from coterie.config.plugins import load_plugin

        for file in files:
            load_plugin(file)


class Group(TyperGroup):
    """A group of commands that suggests a similar command once.

    With some of the permitted versions, both Typer and Click add a suggestion to the message.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if getattr(error, "possibilities", None):  # Click adds them when it shows the message
                error.message = error.message.partition(" Did you mean")[0]  # pyright: ignore
            raise


def group(help: str) -> Typer:
    """Create an app whose commands form a group of subcommands, such as `coterie keys`."""
    return Typer(cls=Group, no_args_is_help=True, rich_markup_mode="markdown", help=help)


class Command(TyperCommand):
    """A command with the additional options --plugin and --debug."""

    def __init__(self, *, params: Sequence[Any], **settings: Any) -> None:
        plugin = TyperOption(
            param_decls=["--plugin"],
            metavar="FILE.py",
            multiple=True,
            callback=_load,
            expose_value=False,
            help="Python file whose methods, transforms, metrics and kinds of data are "
            "registered. Repeatable.",
        )
        traceback = TyperOption(
            param_decls=["--debug"],
            is_flag=True,
            default=False,
            callback=_remember_debug,
            expose_value=False,
            help="Show the full traceback of an error.",
        )
        super().__init__(params=[*params, plugin, traceback], **settings)


def check_run(folder: Path) -> None:
    """Raise CoterieError if a folder contains no run.

    The check is fast, because it does not import torch.
    """
    if not folder.exists():
        raise CoterieError(f"There is no folder {folder}.")
    if not (folder / "run.json").is_file():
        raise CoterieError(f"{folder} is not a run folder (it has no run.json).")


def check_model(folder: Path, client: str | None) -> None:
    """Raise CoterieError if a folder is neither a run with a given client nor a bundle.

    If the run is not finished, print a remark. The check is fast, because it does not import torch.
    """
    if (folder / "coterie.json").is_file():
        return
    check_run(folder)
    if client is None:
        raise CoterieError(f"{folder} is a run; name the client whose model to use with --client.")
    if not (folder / "result.json").exists():
        unfinished = f"The run in {folder} is not finished"
        remedy = f"finish it with `coterie run --resume {folder}`."
        if not any((folder / "checkpoints").glob("[0-9]*")):
            raise CoterieError(f"{unfinished} and has no model yet; {remedy}")
        complain(f"{unfinished}, and its models may still improve; {remedy}")


def device_of(text: str) -> str | list[str]:
    """Convert the text of --device to the name of a device, or to a list of names."""
    return text.split(",") if "," in text else text


def listed(names: str | None) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def require_resume(from_round: int | None) -> None:
    """Raise CoterieError if --from-round is given although no run is resumed."""
    if from_round is not None:
        raise CoterieError("--from-round takes effect only on a run that is resumed; add --resume.")


RunFile = Annotated[
    Path | None,
    Argument(
        help="Run file (YAML), or the name of a built-in demo: `who-wrote-this` (instructions), "
        "`four-assistants` (conversations), `teach-one-another` (a server with its own model) or "
        "`assistants` (conversations with SmolLM2-135M, which is installed separately). "
        "Default: the built-in demo on plain text."
    ),
]
Device = Annotated[
    str,
    Option(
        help="Device of the base: auto (a GPU if there is one), cpu, cuda, cuda:N, mps, or several "
        "GPUs to spread the base over, such as cuda:0,cuda:1."
    ),
]
ServersDevice = Annotated[
    str | None, Option(help="Device of the server's own model. Default: `device` of the run file.")
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Value that overrides a key of the run file: training.batch=4. Repeatable.",
    ),
]
FromRound = Annotated[
    int | None,
    Option(
        min=1,
        metavar="N",
        help="Round after which to resume, if its checkpoint still exists; requires --resume. "
        "Default: the last completed round.",
    ),
]
Out = Annotated[Path | None, Option(help="Run folder. Default: runs/NAME, with the run's name.")]
TopP = Annotated[float, Option(min=0.0, max=1.0, help="Probability mass of nucleus sampling.")]
SamplingSeed = Annotated[int, Option(min=0, help="Random seed of sampling.")]
