"""Turns for tests that call a method's objects by hand."""

from coterie.turn import Turn


def nth(number: int) -> Turn:
    """Return the turn of a run whose rounds have one exchange, without phases."""
    return Turn(number, number, number)
