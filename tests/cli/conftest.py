"""The fixture with which tests run `coterie` in their own process."""

import sys

import pytest
from commands import Command, Said
from rich.console import Console

import coterie.cli
from coterie.cli import terminal


@pytest.fixture
def coterie_command(monkeypatch, capsys) -> Command:
    """Run `coterie ...` in this process, by default 80 columns wide, and return what it said."""

    def command(*arguments: object, width: int = 80) -> Said:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        monkeypatch.setattr(terminal, "console", Console(width=width))
        monkeypatch.setattr(terminal, "errors", Console(width=width, stderr=True))
        capsys.readouterr()
        code: object = 0
        try:
            coterie.cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return Said(code, out, err)

    return command
