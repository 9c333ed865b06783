"""The tutorials, executed as written: their files, their commands and their Python, in order."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = {
    "research/compare-methods": ["first-layers", "95 %"],
    "deploy/three-sites": ["stays on the client", "The sea was"],
    "use/export": ["contains a mixture-of-experts checkpoint", "The sea was", "contains a bundle"],
    "use/use-a-model": ["The sea was"],
}
"""The pages in docs/, and words that the commands before their reference part must print."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of code of a page's tutorial."""
    tutorial, _, _ = page.read_text(encoding="utf-8").partition("\n## Reference\n")
    return re.findall(r"^```(\w+)\n(.*?)^```", tutorial, re.M | re.S)


def execute(page: Path, folder: Path) -> str:
    """Run the commands of a page in a folder, on a free port, and return what they print."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "100"}
    names: dict[str, Any] = {}
    printed = ""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for language, text in blocks(page):
        if file := re.match(r"# (\S+\.\w+)\n", text):
            (folder / file[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, page.name, "exec"), names)
        elif language == "sh":
            text = text.replace("localhost:9092", f"localhost:{port}")
            server = "server study.yaml"
            text = text.replace(server, f"{server} --address 127.0.0.1:{port}")
            command = ["bash", "-euo", "pipefail", "-c", text]
            options: Any = {"capture_output": True, "text": True, "timeout": 300}
            done = subprocess.run(command, cwd=folder, env=environment, **options)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_works_as_written(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = execute(ROOT / "docs" / f"{name}.md", tmp_path)
    for words in TUTORIALS[name]:
        assert words in printed, printed
