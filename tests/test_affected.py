"""The slow tests that CI runs after a change."""

import importlib.util
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

from tests.durations import is_slow, listed

SCRIPT = Path(__file__).parent.parent / "scripts" / "affected.py"
EVERYTHING = (["papers/tests", "tests"], [])
CRASHES = "tests/deployment/test_crashes.py"
SITES = ["tests/test_deploy_files.py", "tests/test_real_base.py"]
"""Files that import tests/sites.py, as tests/deployment does."""
IMPORTS = {"cli": {"engines", "serve"}, "engines": {"methods"}, "methods": {"data"}}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("affected", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "whole", "sampled"),
    [
        ([], [], []),
        (["src/coterie/data/chat.py"], ["tests/data"], ["tests/methods"]),
        (["src/coterie/serve/app.py"], ["tests/serve"], ["tests/cli", "tests/test_*.py"]),
        (["src/coterie/training/dpo.py"], ["tests/training"], ["tests/devices"]),
        (
            ["src/coterie/methods/pcl.py", "src/coterie/engines/local.py"],
            ["papers/tests", "tests/engines", "tests/methods"],
            ["tests/cli", CRASHES, "tests/devices", "tests/test_*.py"],
        ),
        (["tests/serve/test_app.py"], ["tests/serve"], []),
        (["tests/test_docs.py"], ["tests/test_docs.py"], []),
        (["tests/deleted/test_a.py", "tests/test_deleted.py"], [], []),
        (["papers/pcl.md"], ["papers/tests"], []),
        (["docs/index.md"], ["tests/cli", "tests/test_*.py"], []),
        (["tests/sites.py"], ["tests/deployment", *SITES], []),
        (["tests/english.yaml"], ["tests/cli", "tests/test_*.py"], []),
        (["tests/conftest.py"], *EVERYTHING),
        (["docs/index.md", ".ci/run"], *EVERYTHING),
    ],
)
def test_a_change_affects_these_tests(script, changed, whole, sampled) -> None:
    files = {f"tests/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}

    def shortened(paths: list[str]) -> list[str]:
        return sorted({*paths} - files | {"tests/test_*.py"}) if files <= {*paths} else paths

    assert [shortened(paths) for paths in script.affected(changed, IMPORTS)] == [whole, sampled]


def test_a_helper_is_found_in_both_ways_to_import_it(script) -> None:
    folders = script.importers("written_runs")
    assert {"deployment", "report"} <= folders  # from tests.written_runs; from written_runs


def test_packages_are_read_with_what_they_import(script) -> None:
    imports = script.imports()
    assert {"methods", "exchanges"} <= imports["engines"]
    assert "engines" not in imports["methods"]
    assert imports["errors"] == set()


def test_what_the_last_commits_changed_can_be_found(script) -> None:
    for path in chain(*script.after_last_commit()):
        assert (SCRIPT.parent.parent / path).exists()


def test_a_listed_test_or_function_is_slow() -> None:
    ids = frozenset({"tests/test_a.py::test_one", "tests/test_a.py::test_two[x]"})
    slow = [f"tests/test_a.py::test_{name}" for name in ("one", "one[x]", "two[x]")]
    assert all(is_slow(test, ids) for test in slow)
    assert not is_slow("tests/test_a.py::test_two[y]", ids)
    assert all((SCRIPT.parents[1] / test.partition("::")[0]).exists() for test in listed())
