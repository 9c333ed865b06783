"""The overlap of vocabularies."""

import pytest
import torch

from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import Participant
from reproduce.overlap import jaccard, overlap_tables, ranges


def participant(name: str, *ids: int) -> Participant:
    train, other = (Tokens(torch.tensor(t, dtype=torch.int32), 9) for t in (ids, (7, 8)))
    return Participant(name, ClientData(train, other, other), {name: other})


def test_jaccard_of_multisets_of_training_tokens_by_hand() -> None:
    texts = {"a": (1, 2, 2, 3), "b": (3, 2, 2, 2, 4), "c": (5,)}
    shares = jaccard([participant(name, *ids) for name, ids in texts.items()])
    assert shares["a"] == pytest.approx({"a": 4 / 8, "b": 3 / 9, "c": 0})
    assert shares["b"] == pytest.approx({"a": 3 / 9, "b": 5 / 10, "c": 0})
    (table,) = overlap_tables({"table": "T", "columns": {"X": shares}})
    assert table.rows[0] == ("a", "0.50", "0.33", "0.00")


def test_ranges_are_of_clients_with_most_and_least_topics_in_common() -> None:
    mixtures = {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 0.25, "y": 0.75}, "d": {"y": 1}}
    pairs = {"ab": 0.4, "ac": 0.3, "ad": 0.1, "bc": 0.35, "bd": 0.2, "cd": 0.25}
    shares = {i: {j: pairs.get("".join(sorted(i + j)), 0.5) for j in mixtures} for i in mixtures}
    ends = ranges(shares, mixtures)
    assert ends == {"most": (0.4, 0.4), "least": (0.1, 0.2)}
    paper = {"X": {"most": "0.42"}}
    summary = {"table": "T", "columns": {"X": shares}, "ranges": {"X": ends}, "paper": paper}
    ours, _ = overlap_tables(summary)
    assert ours.rows == [["X", "0.40 to 0.40", "0.42", "0.10 to 0.20", ""]]
