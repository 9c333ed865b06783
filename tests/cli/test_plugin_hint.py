"""Ctrl-C says how to go on, plugins and all; also in folders of runs that recorded none."""

import json

import pytest
import typer

from coterie.cli import terminal


@pytest.mark.parametrize(
    ("recorded", "hint"),
    [
        ({}, "`coterie run --resume {folder}`"),  # a run of an earlier version
        ({"plugins": {}}, "`coterie run --resume {folder}`"),
        (
            {"plugins": {"mine": {"file": "/a/mine.py", "sha256": "0"}}},
            "`coterie run --resume {folder} --plugin /a/mine.py`",
        ),
    ],
)
def test_ctrl_c_names_the_plugins_of_the_run(recorded, hint, tmp_path, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(terminal, "complain", said.append)
    (tmp_path / "run.json").write_text(json.dumps(recorded), encoding="utf-8")
    with pytest.raises(typer.Exit), terminal.stoppable(tmp_path):
        raise KeyboardInterrupt
    assert said[0].endswith(f"resume with {hint.format(folder=tmp_path)}.")
