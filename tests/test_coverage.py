"""docs/coverage.md names every recipe and every table and figure of the papers, and what it names
exists."""

import re
from pathlib import Path

import pytest

from coterie.methods.registry import available

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))
BUILT_IN = set(available())  # before any test registers a plugin
TABLES = {"CoMiGS": 6, "PCL": 5, "FedAMoLE": 4}
FIGURES = {"CoMiGS": 19, "PCL": 8, "FedAMoLE": 10}


def test_every_recipe_is_linked() -> None:
    linked = set(re.findall(r"\]\(\.\./(recipes/[^)#]+)\)", PAGE))
    assert linked == set(RECIPES)


def test_every_script_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:tests|benchmarks|scripts)/[\w./-]+\.py", PAGE))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_page_of_results_is_linked() -> None:
    """Pages of a regime are beside those of the table itself."""
    pages = {path.name for path in (ROOT / "docs" / "results").glob("*.md")}
    whole = {name for name in pages if name.replace("-quarter.md", ".md") not in pages - {name}}
    assert set(re.findall(r"\]\(results/([^)#]+)\)", PAGE)) == whole


def test_every_method_is_in_the_table_of_methods() -> None:
    """Those that a paper has: the others are federated averaging's neighbours."""
    section = PAGE.split("## Methods")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w-]+)`", section))
    beyond = {"fedavg-ft", "fedprox", "fedprompt-ft", "fedptuning-ft"}
    assert BUILT_IN - beyond <= named


@pytest.mark.parametrize("paper", TABLES)
def test_every_table_and_figure_has_a_line(paper: str) -> None:
    section = PAGE.split(f"\n## {paper}\n")[1].split("\n## ")[0]
    for kind, count in (("table", TABLES[paper]), ("figure", FIGURES[paper])):
        lines = re.findall(rf"^\| {kind}s? ([\d, toand]+?)[ab]? \|", section, re.MULTILINE)
        found = [number for line in lines for number in _numbers(line)]
        assert sorted(found) == list(range(1, count + 1)), kind


def _numbers(words: str) -> list[int]:
    """Those of "4 to 6", "1, 3, 4" or "9"."""
    if " to " in words:
        first, last = map(int, words.split(" to "))
        return list(range(first, last + 1))
    return [int(number) for number in re.findall(r"\d+", words)]
