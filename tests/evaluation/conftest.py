import random
from importlib.resources import files

import pytest
from naive_near import changed

from coterie.data.kinds.text import pieces


@pytest.fixture(scope="session")
def passages() -> list[str]:
    """Pieces of a book, and the same with ever more words changed."""
    draw = random.Random(0)
    book = (files("coterie") / "assets" / "demo-writers" / "whaler.txt").read_text(encoding="utf-8")
    own = list(pieces(book[:36_000], 600))[:50]
    return own + [changed(text, n % 25 + 1, draw) for n, text in enumerate(own)]
