"""Characters that a stream cannot show, and arguments that are no text."""

import os
import subprocess
import sys


def _main(arguments: list[bytes | str], encoding: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "coterie", *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=300)


def test_an_output_stream_that_lacks_a_character_gets_a_replacement() -> None:
    done = _main(["report", "日本"], "cp1252")
    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: ?? is not a folder")


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = _main(["generate", "runs/demo", "--client", "ada", "--prompt", b"caf\xe9"], "utf-8")
    assert done.returncode == 2
    assert b"Argument 6" in done.stderr
    assert b"Traceback" not in done.stderr
