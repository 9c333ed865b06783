"""The script that builds the documentation's site: how it lays out pages, and what it refuses."""

import re
from pathlib import Path

import pytest

from scripts import build_site


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Return a repository with a page, an index, a source file and a folder of recipes."""
    files = {
        "docs/use/index.md": "# Use\n\n- [Page](page.md): first.\n- [Decision](why/one.md)\n",
        "docs/use/page.md": "# Page\n\n[code](../../src/a.py#a) [all](../../recipes) [up](#page)\n",
        "docs/use/why/one.md": "# One\n\n[overview](../../../README.md#top) [host](https://a.b/c)\n",
        "README.md": "# Read me\n\n[Page](docs/use/page.md#page)\n",
        "src/a.py": "print('````')\n",
        "recipes/small/a.yaml": "seed: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    monkeypatch.setattr(build_site, "PROJECT_PAGES", ("README.md",))
    monkeypatch.setattr(build_site, "SITE_ONLY", {})
    return tmp_path


def test_links_lead_to_the_places_of_their_files_in_the_site(repository) -> None:
    build_site.lay_out(repository / "site")
    page = (repository / "site/use/page.md").read_text()
    assert "[code](../source/src/a.py.md) [all](../source/recipes.md) [up](#page)" in page
    code = (repository / "site/source/src/a.py.md").read_text()
    assert "`````python\nprint('````')\n`````" in code
    assert "(recipes/small/a.yaml.md)" in (repository / "site/source/recipes.md").read_text()
    assert (repository / "site/source/recipes/small/a.yaml.md").exists()
    page = (repository / "site/use/why/one.md").read_text()
    assert "(../../project/README.md#top) [host](https://a.b/c)" in page
    assert "(../use/page.md#page)" in (repository / "site/project/README.md").read_text()


def test_an_index_has_the_pages_of_its_lists_as_contents(repository) -> None:
    build_site.lay_out(repository / "site")
    text = (repository / "site/use/index.md").read_text()
    assert text.endswith("```{toctree}\n:hidden:\n\nPage <page.md>\nDecision <why/one.md>\n```\n")
    assert "toctree" not in (repository / "site/use/page.md").read_text()


def test_a_link_to_a_missing_file_stops_the_build(repository) -> None:
    (repository / "README.md").write_text("[gone](src/gone.py)")
    with pytest.raises(SystemExit, match=r"README.md: src/gone.py does not exist"):
        build_site.lay_out(repository / "site")


def test_every_public_name_is_on_a_reference_page(repository) -> None:
    build_site.lay_out(repository / "site")
    pages = ("use/python-reference.md", "develop/interface-reference.md")
    text = "\n".join((repository / "site" / page).read_text() for page in pages)
    for name in build_site.coterie.__all__:
        assert text.count(f":: coterie.{name}\n") == 1, name
    commands = (repository / "site/use/command-line.md").read_text()
    assert "## `coterie keys" in commands
    assert "..." not in re.sub(r"```console.*?```", "", commands, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="#here" id="here">', None),
        ('<a href="https://example.org/">', None),
        ('<a href="c.html">', "c.html does not exist"),
        ('<a href="b.html#gone">', "b.html#gone has no such anchor"),
        ('<a href="#gone">', "#gone has no such anchor"),
        ('<img src="gone.png">', "gone.png does not exist"),
        ('<script src="https://cdn.example.org/a.js">', "loads https://cdn.example.org/a.js"),
        ('<link href="//fonts.example.org/a.css">', "loads //fonts.example.org/a.css"),
    ],
)
def test_faulty_links_and_foreign_files_are_found(html, fault, tmp_path) -> None:
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<p id="there">')
    expected = [] if fault is None else [f"{tmp_path / 'a.html'}: {fault}"]
    assert list(build_site.faults(tmp_path)) == expected
