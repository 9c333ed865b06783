"""Names of methods and clients that mean something to matplotlib, SVG or HTML."""

import json
import re
from xml.etree import ElementTree

import pytest
from every_method import some
from markupsafe import escape

from coterie.analysis.tables import Table
from coterie.report.page import write_report
from coterie.report.plots import entry
from coterie.report.style import LIGHT, Canvas, Picture

NAMES = (
    r"$\frac{1}$", "$x", "a$b$c", "a_b", "^", "\\", r"\alpha", "_under", "new\nline", "\x1b[31mred",
    "\x00", "\x08", "\ufffe", "\N{GRINNING FACE}", "\N{HEBREW LETTER ALEF}\u202e", "<b>&", "-->",
    "%",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["svg", "png"])
def test_any_name_can_be_drawn(name, kind) -> None:
    def draw(canvas):
        figure, axes = canvas.panels(1, 2.0, x=name, y=name)
        axes[0].plot([0, 1], [0, 1], label=entry(name))
        axes[0].set_title(name)
        axes[0].set_yticks([0, 1], [name, "b"])
        canvas.legend(figure, axes[0])
        return figure

    data = Picture("n", "t", "c", "a", draw).render(Canvas(LIGHT), kind)
    if kind == "svg":
        ElementTree.fromstring(data)


def test_a_table_for_a_notebook_escapes_every_text() -> None:
    html = Table("<i>", ["<b>"], [["<script>"]], "&")._repr_html_()
    assert not {"<i>", "<b>", "<script>"} & {part + ">" for part in html.split(">")}
    assert "&lt;script&gt;" in html


def test_a_table_aligns_numbers_and_is_short_in_a_shell() -> None:
    table = Table("Scores", ["client", "local"], [["anna", "1.25 (3)"], ["ben", "11.50"]], "Note.")
    html = table._repr_html_()
    assert '<td style="text-align: left">anna</td>' in html
    assert '<td style="text-align: right">11.50</td>' in html
    assert (repr(table), str(table)) == ("Table('Scores', rows=2)", table.markdown())


def test_words_between_backticks_are_code_in_html() -> None:
    html = Table("`<i>` of a", ["a"], [["`b`"]], "Column `mean`: the mean.")._repr_html_()
    assert "<code>&lt;i&gt;</code> of a" in html
    assert "Column <code>mean</code>: the mean." in html


TEXTS = ("<script>alert(1)</script>", *NAMES, '"><img src=x onerror=a()>')
PAIRS = list(zip(TEXTS[::2], TEXTS[1::2], strict=True))


@pytest.mark.parametrize("names", some((PAIRS[0],), PAIRS, ()))
def test_a_page_shows_any_name_and_runs_none(names, written) -> None:
    figures = [
        figure
        for name in names
        for n in range(2)
        for figure in (
            (n, name, "loss/joint", 5.0),
            (n, name, "test/trained", {"perplexity": 9.0 - n}),
            (n, name, "change", {"ratio": 1.0, "cosine": None}),
            (n, name, "trust", {name: 1.0}),
        )
    ]
    clients = {n: {"data": "1", "tokens": {"train": 9}, "labels": {n: 3}} for n in names}
    folder = written("run", {"name": "local"}, figures=figures, perplexities=None, clients=clients)
    scores = {name: {"perplexity": 8.0, "bits_per_byte": 1.0} for name in names}
    result = {"method": "local", "reports": "trained", "trained": scores, "aggregated": scores}
    (folder / "result.json").write_text(json.dumps(result))
    page = write_report([folder], folder / "report").page.read_text(encoding="utf-8")
    assert not re.search(r"<script|<img src=x|<b>&", page)
    for name in set(names) - {"\x00", "\x08", "\ufffe"}:
        assert escape(name.replace("\n", " ")) in page.replace("\n", " ")
