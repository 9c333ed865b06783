"""Commands that prepare a run: `coterie init` and `coterie divide`."""

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from coterie.cli import terminal
from coterie.errors import CoterieError, plural

if TYPE_CHECKING:
    from coterie.config.run import RunConfig
    from coterie.data.folder import TextFolder


def init(
    folder: Annotated[
        Path,
        Argument(help="Folder of texts, with a .txt, .jsonl or .parquet file or a folder each."),
    ],
    out: Annotated[Path, Option(metavar="FILE", help="Run file to write.")] = Path("coterie.yaml"),
    base: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Base (built-in, a folder, a GGUF file, or a name on the Hugging Face hub). The "
            "run file also gets the settings with which it fits this machine's memory. Default: "
            "tiny-gpt2, which ships with Coterie.",
        ),
    ] = None,
    everything: Annotated[
        bool, Option("--all", help="Write every key; those not needed are commented out.")
    ] = False,
) -> None:
    """Write a run file for a folder of texts, with each key's meaning and default as a comment.

    Each file or subfolder of the folder is the text of one client, named after it: anna.txt, or
    anna/ with any number of files. If a subfolder has train.jsonl and perhaps validation.jsonl and
    test.jsonl, these are the client's splits; any of them may also be .txt, .parquet or a folder.
    Conversations, instructions and preferences are recognised by the fields of their records.

    The file runs as it is. Edit it to change the run; `coterie methods` lists the methods.

    For example:

        coterie init texts --out ours.yaml
        coterie run ours.yaml
    """
    if out.exists() or out.is_symlink():
        raise CoterieError(f"{out} already exists; choose another file with --out.")
    from coterie.config.commented import commented
    from coterie.config.errors import validated
    from coterie.config.read import bind
    from coterie.config.sections import RunFile
    from coterie.data.files import listed_first
    from coterie.data.folder import read_folder
    from coterie.files import write_text

    texts = read_folder(folder)
    values = _values(texts, folder, out, base)
    file = validated(RunFile, {**values, "data_root": str(out.parent)})
    if base is not None:
        with terminal.progress("Computing the memory of a client"):
            _fit(bind(file), values)
    name = quote(str(out))
    write_text(out, _header(name, everything) + commented(values, everything))
    clients = f"{plural(len(texts.clients), 'client')} ({listed_first(list(texts.clients))})"
    terminal.say(
        f"Wrote {out} for {clients} with {texts.kind}.",
        "To check the texts, and to train:",
        f"  coterie data {name}",
        f"  coterie run {name}",
    )


def _header(name: str, everything: bool) -> str:
    """Return the comment at the top of a run file that has the given name."""
    rest = "docs/use/run-file-keys.md lists all keys; `coterie init --all` writes them."
    if everything:
        rest = "To set a key, remove the # before it, and the # before its section's name."
    return f"# A run file: `coterie run {name}` runs it.\n# {rest}\n\n"


def _values(texts: "TextFolder", folder: Path, out: Path, base: str | None) -> dict[str, Any]:
    """Return the keys of a run file that beginners need, mostly with their defaults.

    Args:
        texts: The clients and the kind of data.
        folder: The folder of the texts.
        out: The run file. Relative paths start from its folder.
        base: The name or the path of the base; None for the default.
    """
    from coterie.config.sections import RunFile
    from coterie.files import path_part
    from coterie.names import DEVICE

    def relative(path: str | Path) -> str:
        return Path(os.path.relpath(path, out.parent)).as_posix()

    default = RunFile.model_construct()
    name = path_part(folder.resolve().name)[:64]
    if base is not None and not Path(base).is_absolute() and Path(base).exists():
        base = relative(base)
    return {
        "name": default.name if not name or DEVICE.fullmatch(name) else name,
        "base": {"name": base or default.base.name},
        "method": default.method,
        "baselines": [*default.baselines],
        "rounds": default.rounds,
        "data": {"window": default.data.window, **texts.data},
        "clients": [
            {"name": name} | {key: relative(path) for key, path in paths.items()}
            for name, paths in texts.clients.items()
        ],
        "training": {"steps": default.training.steps, "batch": default.training.batch},
    }


def _fit(config: "RunConfig", values: dict[str, Any]) -> None:
    """Add the settings with which a client of a run fits this machine to the run file's values."""
    from coterie.analysis.fit import fitted, with_longest_window
    from coterie.bases.devices import device_type, memory_of

    config = with_longest_window(config, config.data.window)
    values["data"]["window"] = config.data.window
    device = device_type(config.device)
    run = fitted(config, config.clients[0].name, memory_of(device), device)
    if run is None:
        terminal.complain(
            f"There is no estimate of the memory that a client needs with {config.base}; if it is "
            "too much, set a smaller training.micro_batch."
        )
        return
    if (weights := run.base.weights) is not None:
        values["base"]["weights"] = weights
        values["training"]["precision"] = run.training.precision
    if run.training.at_once < run.training.batch:
        values["training"]["micro_batch"] = run.training.micro_batch
    if run.training.checkpointing:
        values["training"]["checkpointing"] = True
    if run.evaluation.batch < config.evaluation.batch:
        values["evaluation"] = {"batch": run.evaluation.batch}


def divide(
    file: Annotated[
        Path,
        Argument(metavar="RUNFILE", help="Run file (YAML) with the section `divide`, or a demo."),
    ],
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder to create.")],
    seed: Annotated[
        int | None, Option(min=0, help="Seed of the division. Default: the run file's seed.")
    ] = None,
) -> None:
    """Write the clients' texts that a run file's section `divide` makes from one data set.

    Each client gets a folder with the files train.jsonl, validation.jsonl and test.jsonl. A public
    set is the file public.jsonl. The file run.yaml is the run file with these files in place of
    `divide`. A run on the files ends with the same bits as the run that divides the data set;
    the command prints any exceptions. In a deployment, carry each client's folder to its machine.

    For example:

        coterie divide news.yaml --out news
        coterie run news/run.yaml
    """
    from coterie.config.divided import RUN_FILE, write_divided
    from coterie.config.values import read_values

    values = read_values(file, [] if seed is None else [f"seed={seed}"])
    with terminal.progress("Reading") as show:
        divided = write_divided(file, values, out, show)
    for client, (train, validation, test) in divided.records.items():
        terminal.say(
            f"{client}: {train:,} records for training, {validation:,} for validation, "
            f"{test:,} for testing"
        )
    terminal.say(f"\nThe texts of {plural(len(divided.records), 'client')} are in {out}.")
    run = quote(str(out / RUN_FILE))
    if divided.differences:
        terminal.say("A run on these files differs from the run that divides the data set:")
        terminal.say(*(f"  {sentence}" for sentence in divided.differences))
    terminal.say("To train on these files:", f"  coterie run {run}")
