"""The files of a run file's section `divide:`, and a run file whose clients have these files."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coterie.config.errors import validated
from coterie.config.read import bind
from coterie.config.run import RunConfig
from coterie.config.sections import RunFile
from coterie.config.values import put
from coterie.data.division.divide import Division, divided_records
from coterie.data.division.files import DivisionFiles
from coterie.data.division.labelled import Labelled
from coterie.data.texts import SPLITS
from coterie.errors import CoterieError
from coterie.files import write_folder, write_text
from coterie.methods.registry import POOLED

RUN_FILE = "run.yaml"
"""The name of the written run file."""


@dataclass(frozen=True)
class Divided:
    """A data set that was divided and written to files."""

    records: dict[str, list[int]]
    """The numbers of each client's training, validation and test records."""
    differences: list[str]
    """Sentences that say how a run on the files differs from the run that divides the data set."""


def write_divided(
    source: Path, values: dict[str, Any], folder: Path, begin: Callable[[str], None]
) -> Divided:
    """Divide a run's data set, and write the clients' texts and a run file to a new folder.

    Args:
        source: The run file, for messages.
        values: The plain data of the run file, whose seed determines the division.
        folder: The folder to create.
        begin: Called at the start of each stage with the stage's description.

    Raises:
        CoterieError: The folder exists, the run file has no section `divide`, or the data set
            cannot be divided or written.
    """
    if folder.exists():
        raise CoterieError(f"{folder} already exists; choose another folder with --out.")
    if values.get("divide") is None:
        raise CoterieError(
            f"{source} has no section `divide`, so there is no data set to divide; its clients "
            "have files of their own."
        )
    config = bind(validated(RunFile, values))
    assert config.divide is not None
    begin(f"Dividing {config.name}")
    division = divided_records(config.divide, config.data, config.root, config.seed)
    files = DivisionFiles(division, config.data, config.divide.label)
    files.check()
    shared = _shared(config, division)
    differences = _differences(config, shared)
    run = _run_values(values, files, config.root, folder.resolve(), shared)

    def fill(temporary: Path) -> None:
        for client in division:
            begin(f"Writing {client}")
            if not files.write_client(client, temporary / client):
                differences.append(
                    f"{client}'s own records give other choices of answers than the whole data "
                    "set; set data.instructions.choices."
                )
        for name, records in shared.values():
            files.write(temporary / name, records)
        text = yaml.safe_dump(
            run, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000
        )
        header = f"# {source}, on files that `coterie divide` wrote with seed {config.seed}\n"
        write_text(temporary / RUN_FILE, header + text)

    write_folder(folder, fill)
    sizes = {n: [len(getattr(texts, s)) for s in SPLITS] for n, texts in division.items()}
    return Divided(sizes, differences)


def _shared(config: RunConfig, division: Division) -> dict[str, tuple[str, list[Labelled]]]:
    """Return the files that belong to no client: for each key, the file's name and its records."""
    if (public := division.public) is None:
        return {}
    files = {"data.public": ("public.jsonl", public.train)}
    scored = getattr(public, config.evaluation.split)
    if scored and config.server is not None and config.server.test is None:
        files["server.test"] = ("server-test.jsonl", scored)
    return files


def _differences(config: RunConfig, shared: Collection[str]) -> list[str]:
    """Return sentences that say how a run differs if its public set is a file.

    Args:
        config: The run that divides the data set.
        shared: The keys of the files that belong to no client.
    """
    sentences = []
    if "data.public" in shared and POOLED in (config.label, *config.baselines):
        sentences.append(f"{POOLED} does not train on a public set that is a file.")
    if "server.test" in shared:
        sentences.append("The server's validation text is its test text.")
    return sentences


def _run_values(
    values: dict[str, Any],
    files: DivisionFiles,
    root: Path,
    folder: Path,
    shared: Mapping[str, tuple[str, list[Labelled]]],
) -> dict[str, Any]:
    """Return the plain data of a run file in which files replace the section `divide`.

    Args:
        values: The plain data of the original run file.
        files: The files of the division.
        root: The folder that relative paths in `values` start from. In the result, they start from
            `folder` unless another key names a file in `root`.
        folder: The folder that will contain the clients' folders and the run file.
        shared: The files that belong to no client; see `_shared`.
    """
    prefix, data_root = Path(), None
    if any(os.path.lexists(root / text) for text in _relative(values)):
        prefix, data_root = (
            Path(os.path.relpath(*ends)) for ends in ((folder, root), (root, folder))
        )
    clients = [
        {"name": name} | {s: (prefix / name / f"{s}.jsonl").as_posix() for s in SPLITS}
        for name in sorted(files.division)
    ]
    replaced = {"divide": ("clients", clients), "data_root": ("data_root", str(data_root))}
    kept = ((key, value) for key, value in values.items() if key != "clients")  # an empty list
    run = dict(replaced.get(key, (key, value)) for key, value in kept)
    if data_root is None:
        del run["data_root"]
    for key, (name, _) in shared.items():
        put(run, key, (prefix / name).as_posix())
    for key, value in files.settings.items():
        put(run, key, value)
    return run


def _relative(value: Any) -> Iterator[str]:
    """Yield all strings in a run file's data that may be relative paths of files to keep."""
    if isinstance(value, str) and not os.path.isabs(value):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("data_root", "divide"):
                yield from _relative(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _relative(inner)
