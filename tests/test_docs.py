"""The pages tell the truth: their code runs, their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert code == (ROOT / "examples" / "fedsa_lora.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_the_example_of_following_a_run_runs(values, tmp_path, monkeypatch, capsys) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    [code] = [code for code in codes if "watch=" in code]
    monkeypatch.chdir(tmp_path)
    config = values(method="local", rounds=2)
    exec(code.replace('"us.yaml"', "CONFIG"), {"CONFIG": config, "__name__": "example"})
    assert re.findall(r"round \d", capsys.readouterr().out) == ["round 1", "round 2"]
