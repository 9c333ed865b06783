"""A run of every method, and methods of packages that are installed beside this one."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from every_method import each_method, run_of

from coterie.config.run import RunConfig
from coterie.methods.registry import METHODS


@pytest.fixture(params=each_method())
def each_run(request, values, teachers) -> RunConfig:
    return run_of(request.param, values, teachers)


@pytest.fixture
def install(monkeypatch) -> Iterator[Callable[..., None]]:
    """A function that installs packages' methods, which are given by functions that load them."""

    def installed(**loads: Callable[[], Any]) -> None:
        entries = [SimpleNamespace(name=n, value=f"pkg:{n}", load=f) for n, f in loads.items()]
        monkeypatch.setattr("coterie.registry.entry_points", lambda group: entries)
        vars(METHODS).pop("entries", None)

    yield installed
    vars(METHODS).pop("entries", None)
