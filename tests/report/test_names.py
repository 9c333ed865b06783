"""Names of methods and clients that mean something to matplotlib, SVG or HTML."""

from xml.etree import ElementTree

import pytest

from coterie.report.plots import entry
from coterie.report.style import LIGHT, Canvas, Picture
from coterie.results.tables import Table

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
