"""Metrics that a client sends have the type that tables and reports show."""

import pytest
from pydantic import ValidationError

from coterie.messages.envelope import Entry

SCORE = {"perplexity": 20.0, "bits_per_byte": 1.5, "tokens": 100}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss/joint", 4.5),
        ("loss/joint", 4),
        ("kept", 3),
        ("test/trained", SCORE),
        ("trust", {"poet": 0.5, "whaler": None}),
        ("rank", {"generalist.0/h.0": 8}),
        ("taught", {"after": 1, "loss": 0.5}),
        ("routing/h.0.mlp", [[0.5, 0.5], [1, 0]]),
        ("fusion", [0.5, 0.5]),
        ("a plugin's own", {"any": ["thing", None]}),
    ],
)
def test_figures_of_their_type_are_taken(name, value) -> None:
    assert Entry(round=0, client="poet", name=name, value=value).value == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("loss/joint", wrong) for wrong in ("4.5", None, [4.5], {"a": 1}, True, float("nan"))],
        *[("kept", wrong) for wrong in (-1, 2.0, 2**40, "0")],
        *[("test/trained", wrong) for wrong in (4.5, {"perplexity": 20.0}, {**SCORE, "x": "y"})],
        *[("trust", wrong) for wrong in (0.5, [0.5], {"poet": "much"}, {"poet": {"a": 1}})],
        *[("rank", wrong) for wrong in (8, {"a": [8]})],
        *[("taught", wrong) for wrong in (0.5, {"loss": "low"})],
        *[("routing/h.0.mlp", wrong) for wrong in (0.5, [["a"]], {"a": 1}, [None])],
        *[("fusion", wrong) for wrong in ("half", {"a": 1})],
        ("a plugin's own", float("inf")),
    ],
)
def test_others_are_refused(name, value) -> None:
    with pytest.raises(ValidationError):
        Entry(round=0, client="poet", name=name, value=value)
