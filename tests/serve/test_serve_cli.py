"""`coterie serve`: a process of its own, Ctrl-C, and what is refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import die_with_parent, free_port

import coterie.cli

ROOT = Path(__file__).parents[2]
ASK = {"model": "anna", "messages": [{"role": "user", "content": "Name a sea."}], "max_tokens": 8}


@pytest.mark.slow
def test_serves_the_page_and_the_api_until_ctrl_c(talks: Path, tmp_path: Path) -> None:
    """Execute the commands of docs/use/serve.md with another port."""
    keys = tmp_path / "keys.txt"
    keys.write_text("a-key\n")
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "coterie", "serve", talks, "--address", address]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, **streams}
    command += ["--key-file", keys]
    process = subprocess.Popen(command, preexec_fn=die_with_parent(), **options)
    lines: list[str] = []
    while not lines or "Serving" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    assert lines[0].startswith("Models: base, fedavg:anna,")
    headers = {"Authorization": "Bearer a-key"}
    with httpx.Client(base_url=f"http://{address}", headers=headers, timeout=60) as client:
        assert "<title>Coterie" in client.get("/").text
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200
        body = ASK | {"max_tokens": 180, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            pieces = reply.iter_lines()
            next(pieces)
            process.send_signal(signal.SIGINT)
            rest = [json.loads(piece[6:]) for piece in pieces if piece and "[DONE]" not in piece]
    assert (process.wait(60), process.stdout.read()) == (0, "Stopped.\n")
    assert "error" in rest[-1] or rest[-1]["choices"][0]["finish_reason"], "or it was fast"


@pytest.fixture
def refusal(monkeypatch, capsys) -> Callable[..., str]:
    """The error of `coterie serve`, which must be one line."""

    def refusal(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["coterie", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            coterie.cli.main()
        assert end.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("Error: ")
        assert message.count("\n") == 1
        return message

    return refusal


def test_wrong_commands_are_refused(talks: Path, tmp_path: Path, refusal) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    unfinished = Path(shutil.copytree(talks, tmp_path / "unfinished"))
    (unfinished / "result.json").unlink()
    address = ("--address", f"127.0.0.1:{free_port()}")
    refused = {
        (tmp_path / "nowhere",): "There is no folder",
        (tmp_path,): "is not a run folder",
        (talks, "--address", "localhost:8000"): "--address takes an IP address and a port",
        (talks, "--address", "0.0.0.0:0"): "add --key-file FILE",
        (talks, "--key-file", empty): "contains no key",
        (talks, "--key-file", tmp_path / "nofile"): "cannot be read",
        (unfinished, *address): "is not finished",
    }
    for arguments, message in refused.items():
        assert message in refusal(*arguments)


def test_a_used_port_is_refused_before_loading(talks: Path, refusal, monkeypatch) -> None:
    monkeypatch.setattr("coterie.serve.models.Models", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        message = refusal(talks, "--address", f"127.0.0.1:{other.getsockname()[1]}")
    assert "another program uses port" in message
