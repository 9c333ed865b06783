"""Commands that prepare a run: `coterie init` and `coterie divide`."""

from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Option

from coterie.cli import terminal
from coterie.errors import plural


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
