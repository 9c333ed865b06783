"""The pages tell the truth: their code runs, their links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

import coterie
from coterie.runs import RunFolder

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_method_that_the_page_adds_runs(config, tmp_path) -> None:
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    names: dict = {}
    exec(code, names)
    run = config(rounds=2, threads=1)
    done = coterie.run(run, method=names["FedSALora"](), out=tmp_path / "fedsa")
    states = [RunFolder(done.path).load(f"client-{name}")["adapter"] for name in ("poet", "whaler")]
    assert not any(torch.equal(mine, states[1][name]) for name, mine in states[0].items())
    shared = RunFolder(done.path).load("server")["adapter"]
    assert set(shared) == {name for name in states[0] if name.endswith(".A")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
