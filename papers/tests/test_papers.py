"""The pages of papers/ cover all recipes and methods, and the papers' tables and figures."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from coterie.cli import app
from coterie.methods.registry import METHODS
from reproduce.__main__ import app as reproduce_app
from reproduce.tables import load_table

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
TEXT = "\n".join(PAGES.values())
OVERVIEWS = {"README", "overview", "tables", "data", "scenarios"}
PAPERS = sorted(PAGES.keys() - OVERVIEWS)
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))
CLAIMS = yaml.safe_load((ROOT / "reproduce" / "claims.yaml").read_text(encoding="utf-8"))
BUILT_IN = set(METHODS.builtin)
COTERIE: Any = typer.main.get_command(app)
REPRODUCE: Any = typer.main.get_command(reproduce_app)
TABLES = {"comigs": 6, "pcl": 5, "fedamole": 4}
FIGURES = {"comigs": 19, "pcl": 8, "fedamole": 10}


def test_each_paper_has_a_page_and_an_index_links_them() -> None:
    assert set(PAPERS) == {paper.lower() for paper in CLAIMS}
    summary = ROOT.parent / "docs" / "research" / "reproduced-papers.md"
    assert set(PAPERS) <= set(
        re.findall(r"papers/(\w+)\.md\)", summary.read_text(encoding="utf-8"))
    )


def test_every_recipe_is_linked() -> None:
    linked = set(re.findall(r"\]\((recipes/[^)#]+\.yaml)\)", TEXT))
    assert linked == set(RECIPES)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_own_recipes_are_on_its_page(paper: str) -> None:
    own = {
        name for name in RECIPES if name.startswith((f"recipes/{paper}/", f"recipes/small/{paper}"))
    }
    linked = set(re.findall(r"\]\((recipes/[^)#]+\.yaml)\)", PAGES[paper]))
    assert own
    assert own <= linked


def test_every_script_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:(?:papers/)?tests|benchmarks|reproduce)/[\w./-]+\.py", TEXT))
    assert named
    folders = (ROOT, ROOT.parent)
    assert [p for p in sorted(named) if not any((f / p).exists() for f in folders)] == []


def test_every_page_of_results_is_linked() -> None:
    pages = {path.name for path in (ROOT / "results").glob("*.md")}
    assert set(re.findall(r"\]\(results/([^)#]+\.md)", TEXT)) == pages


def test_every_method_is_in_a_table_of_methods() -> None:
    sections = [section(PAGES[paper], "Methods") for paper in PAPERS]
    named = set(re.findall(r"`([\w-]+)`", "\n".join(sections)))
    # variants of other methods, and methods of our own
    beyond = {"fedavg-ft", "fedprox", "fedprompt-ft", "fedptuning-ft", "grouped", "auto"}
    assert BUILT_IN - beyond <= named


@pytest.mark.parametrize("paper", TABLES)
def test_every_table_and_figure_has_a_line(paper: str) -> None:
    lines = section(PAGES[paper], "Tables and figures")
    for kind, count in (("table", TABLES[paper]), ("figure", FIGURES[paper])):
        rows = re.findall(rf"^\| {kind}s? ([\d, toand]+?)[ab]? +\|", lines, re.MULTILINE)
        listed = [number for row in rows for number in numbers(row)]
        assert sorted(listed) == list(range(1, count + 1)), kind


@pytest.mark.parametrize("paper", CLAIMS)
def test_every_tested_claim_is_on_its_page_under_its_number(paper: str) -> None:
    page = section(PAGES[paper.lower()], "Claims and verdicts")
    for claim in CLAIMS[paper]:
        assert re.search(rf"^{claim['number']}\. \*\*", page, re.MULTILINE), claim["claim"]
        assert re.search(rf"^\| {claim['number']}\. ", page, re.MULTILINE), claim["claim"]


def test_the_examples_on_the_pages_can_be_parsed() -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "sh", "yaml"}
    for language, text in blocks:
        if language == "python":
            compile(text, "page", "exec")
    shell = "".join(text for language, text in blocks if language == "sh")
    for line in re.sub(r"\\\n\s*", "", shell).splitlines():
        words = shlex.split(line)
        if words[0] == "coterie":
            COTERIE.commands[words[1]].make_context("", words[2:])
        elif words[:3] == ["python", "-m", "reproduce"]:
            REPRODUCE.make_context("", words[3:])


def test_the_example_of_a_table_file_is_a_table(tmp_path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGES["tables"], re.DOTALL)
    path = tmp_path / "table.yaml"
    path.write_text(example)
    _, (column,) = load_table(path)
    assert column.cells["CoMiGS"].method.described()["mlp"]["specialists"] == {"anna": 1, "ben": 3}


def section(page: str, name: str) -> str:
    """Return a section of a page, without its heading."""
    return page.split(f"\n## {name}\n")[1].split("\n## ")[0]


def numbers(words: str) -> list[int]:
    """Return the numbers of "4 to 6", "1, 3, 4" or "9"."""
    if " to " in words:
        first, last = map(int, words.split(" to "))
        return list(range(first, last + 1))
    return [int(number) for number in re.findall(r"\d+", words)]
