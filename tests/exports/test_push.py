"""Uploads to a local stand-in of the hub."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

import coterie
from coterie import CoterieError


class Hub:
    """The requests and files that the stand-in for the hub has received."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.is_open = True


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """The routes of the hub that create a repository and take a commit of small files."""
    received = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"id": "anna/model", "private": True, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received.requests.append(self.path)
            if not received.is_open:
                return self.reply({"error": "Invalid credentials"}, 401)
            if self.path == "/api/repos/create":
                received.created.append(json.loads(body))
                return self.reply({"url": f"{constants.ENDPOINT}/anna/model"})
            if "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
                return self.reply({"files": modes})
            if "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        file = line["value"]
                        received.files[file["path"]] = base64.b64decode(file["content"])
                address = f"{constants.ENDPOINT}/anna/model/commit/1"
                return self.reply({"commitUrl": address, "commitOid": "1", "success": True})
            return self.reply({"errors": [], "warnings": []})

        def reply(self, value: Any, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield received
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_upload_is_a_private_repository(hub: Hub, finished, in_this_process, tmp_path) -> None:
    done = coterie.export(finished("fedit"), "poet", tmp_path / "out", push="anna/model")
    assert done.url == f"{constants.ENDPOINT}/anna/model"
    [created] = hub.created
    assert created.get("private") is True or created.get("visibility") == "private"
    assert hub.files == {file.name: file.read_bytes() for file in done.path.iterdir()}
    assert "adapter_model.safetensors" in hub.files


def test_a_failed_upload_keeps_the_folder(hub: Hub, finished, in_this_process, tmp_path) -> None:
    hub.is_open = False
    with pytest.raises(CoterieError, match=r"The export is in .*out, but could not be uploaded to"):
        coterie.export(finished("fedit"), "poet", tmp_path / "out", push="anna/model")
    assert (tmp_path / "out" / "README.md").is_file()
