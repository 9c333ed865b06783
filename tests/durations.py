"""The tests that take long, which are measured and listed in slow.json.

`make durations` executes all tests without the marks `slow` and `thorough`, and writes the list.
The listed tests get the mark `slow`, except those of `ALWAYS`.
"""

import json
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("slow.json")
SECONDS = 0.5
"""From this time on, a test is in the list."""
ALWAYS = ("tests/methods/test_contract.py",)
"""Files whose tests `make test` runs although they take long."""


def listed() -> frozenset[str]:
    """Return the ids in the list: of single tests, and of functions of which all tests are slow."""
    return frozenset(json.loads(LIST.read_text(encoding="utf-8")))


def is_slow(test: str, ids: frozenset[str]) -> bool:
    """Return whether a test is in the list."""
    return (test in ids or test.partition("[")[0] in ids) and not test.startswith(ALWAYS)


class Recorder:
    """A pytest plugin that measures all tests and writes the list.

    The seconds of a test are those of its call and of its fixtures. The time of a fixture that
    several tests share counts for each of them, because each needs it if the others do not run.
    Fixtures of the whole session do not count.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            shared = fixturedef.scope == "session"
            fixturedef.seconds = 0.0 if shared else time.perf_counter() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            info: Any = getattr(item, "_fixtureinfo", None)
            fixtures = [f for fs in info.name2fixturedefs.values() for f in fs] if info else []
            spent = sum(getattr(fixture, "seconds", 0.0) for fixture in fixtures)
            item.user_properties.append(("seconds", time.perf_counter() - start + spent))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            properties: dict[str, Any] = dict(report.user_properties)
            self.seconds[report.nodeid] = properties["seconds"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        functions: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            functions[test.partition("[")[0]].append(test)
        ids: list[str] = []
        for function, tests in functions.items():
            slow = [test for test in tests if self.seconds[test] >= SECONDS]
            ids += [function] if slow == tests else slow
        LIST.write_text(json.dumps(sorted(ids), indent=0) + "\n", encoding="utf-8")
