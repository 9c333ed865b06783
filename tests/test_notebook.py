"""The notebook: its stored outputs are those of one execution, and its code still works."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
TEXT = NOTEBOOK.read_text(encoding="utf-8")
CELLS: list[dict[str, Any]] = json.loads(TEXT)["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_stored_outputs_are_of_one_execution_and_name_no_path() -> None:
    assert json.loads(TEXT)["nbformat"] == 4
    assert {cell["cell_type"] for cell in CELLS} == {"code", "markdown"}
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    outputs = [output for cell in CODE for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"display_data", "execute_result", "stream"}
    shown = {kind for output in outputs for kind in output.get("data", ())}
    assert {"text/html", "image/png"} <= shown
    places = ("/work", "/home", "/root", "/tmp", "site-packages")
    assert not [name for name in places if name in TEXT]
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_its_links_lead_somewhere() -> None:
    texts = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = [part.partition(")")[0] for part in texts.split("](")[1:]]
    assert links
    assert all(link.startswith("http") or (NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.slow
def test_its_code_works(tmp_path) -> None:
    """Execute the cells in order in one process, without the packages of Jupyter."""
    code = "\n\n".join("".join(cell["source"]) for cell in CODE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MPLBACKEND": "agg"}
    options: Any = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0, done.stderr
    assert "The sea was" in done.stdout
    assert (tmp_path / "runs" / "notebook" / "table.md").exists()
