"""Drawing a report's figures as its page does."""

from xml.etree import ElementTree

from coterie.report.style import THEMES, Canvas, Picture


def drawn(found) -> Picture:
    """The only figure, once it has been drawn for both themes and widths."""
    (picture,) = found
    assert isinstance(picture, Picture)
    for narrow, theme in enumerate(THEMES):
        ElementTree.fromstring(picture.render(Canvas(theme, bool(narrow)), "svg"))
    return picture
