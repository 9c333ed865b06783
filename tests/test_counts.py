"""The repository does not grow unnoticed: a change that needs more raises a limit here."""

from pathlib import Path

import pytest

from scripts import counts

ROOT = Path(__file__).parent.parent
LIMITS = {
    "files": 1_138,
    "lines of src": 33_450,
    "lines of tests": 39_500,
    "lines of papers": 4_050,
    "lines of benchmarks": 2_750,
    "lines of scripts": 1_030,
    "lines of examples": 480,
    "words": 51_500,
    "kB of the wheel": 22_000,
}


def test_no_count_is_above_its_limit() -> None:
    measured = counts.counts(ROOT)
    assert measured.keys() == LIMITS.keys()
    assert {n: c for n, c in measured.items() if c > LIMITS[n]} == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("# why\n\nx = 1  # here\n", 1),
        ('"""Docs.\n\nMore.\n"""\n\ndef f():\n    """Return."""\n    return 1\n', 2),
        ('x = """a\nb"""\ny = [\n    1,\n]\n', 5),
    ],
)
def test_lines_of_code_exclude_blanks_comments_and_docstrings(text, lines) -> None:
    assert counts.code_lines(text) == lines
