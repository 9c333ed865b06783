"""A pipe in the place of a file is refused, and no reader waits for its writer."""

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

import coterie
from coterie import files
from coterie.alignment.read import read_vocabulary
from coterie.bases.checks import read_object
from coterie.config.plugins import load_plugin
from coterie.data.files import parquet_fields, read_records, read_text
from coterie.errors import CoterieError

SOURCE = Path(coterie.__file__).parent
OTHERS = {
    "files.py": "the module through which all other modules open files",
    "cli/flower.py": "the app's template in the package",
    "cli/serve.py": "--key-file, which may be a pipe that the user has opened",
    "config/values.py": "the run file, which may be a pipe that the user has opened",
    "data/chat.py": "a template in the package",
    "data/templates.py": "a template in the package",
    "memory.py": "a file of the operating system",
    "serve/app.py": "the page in the package",
}
"""The modules that may open files without this check, and the files that they open."""


def readers() -> dict[str, Callable[[Path], object]]:
    """Return functions that read a file, by names for the file."""
    return {
        "bytes": files.read_file,
        "inside": lambda path: files.read_inside(path.parent, path.name),
        "lock": files.open_lock,
        "line": lambda path: files.append_line(path, "line"),
        "hash": files.sha256_of,
        "object.json": read_object,
        "vocabulary.json": read_vocabulary,
        "plugin.py": load_plugin,
        "text.txt": lambda path: read_text(path, "anna"),
        "records.jsonl": lambda path: list(read_records(path, "anna")),
        "records.parquet": lambda path: list(read_records(path, "anna")),
        "fields.parquet": parquet_fields,
    }


def test_no_reader_waits_for_the_writer_of_a_pipe(tmp_path: Path) -> None:
    """Read in a daemon thread, which no process waits for."""
    refused = []

    def read_pipes() -> None:
        for name, read in readers().items():
            os.mkfifo(tmp_path / name)
            with pytest.raises((OSError, CoterieError)):
                read(tmp_path / name)
            refused.append(name)

    thread = Thread(target=read_pipes, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert refused == list(readers())


def opens(call: ast.Call) -> bool:
    """Return whether a call opens a file without a check of the file's kind."""
    checked = [ast.unparse(each).startswith("open_regular(") for each in call.args]
    match call.func:
        case ast.Name("open"):
            return not any(checked)
        case ast.Attribute(ast.Name("os"), "open"):
            return True
        case ast.Attribute(_, "open"):  # other methods `open` take no text
            return any(isinstance(each, ast.Constant) for each in [*call.args, *call.keywords])
        case ast.Attribute(_, name):
            return name in ("read_text", "read_bytes")
    return False


def test_files_are_opened_in_few_modules() -> None:
    modules = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls = ast.walk(ast.parse(text)) if re.search("open|read_(text|bytes)", text) else ()
        if any(isinstance(node, ast.Call) and opens(node) for node in calls):
            modules.add(path.relative_to(SOURCE).as_posix())
    assert modules - {f"testing/{name}" for name in ("small.py", "bases.py")} == OTHERS.keys()
