"""Drawing a report's figures as its page does."""

from xml.etree import ElementTree

from coterie.report.style import THEMES, Canvas, Picture


def drawn(pictures) -> Picture:
    """Draw the only picture for both themes and widths, and return it."""
    (picture,) = pictures
    assert isinstance(picture, Picture)
    for narrow, theme in enumerate(THEMES):
        ElementTree.fromstring(picture.render(Canvas(theme, bool(narrow)), "svg"))
    return picture
