"""The overlap of vocabularies."""

import pytest
import torch

from coterie.data.tokens import ClientData, Tokens
from coterie.federation import Participant
from coterie.results.overlap import OverlapTable, jaccard


def participant(name: str, *ids: int) -> Participant:
    train, other = (Tokens(torch.tensor(t, dtype=torch.int32), 9) for t in (ids, (7, 8)))
    return Participant(name, ClientData(train, other, other), {name: other})


def test_jaccard_by_hand() -> None:
    """Of the training texts alone, each token as often as it stands there."""
    texts = {"a": (1, 2, 2, 3), "b": (3, 2, 2, 2, 4), "c": (5,)}
    shares = jaccard([participant(name, *ids) for name, ids in texts.items()])
    assert shares["a"] == pytest.approx({"a": 4 / 8, "b": 3 / 9, "c": 0})
    assert shares["b"] == pytest.approx({"a": 3 / 9, "b": 5 / 10, "c": 0})
    (table,) = OverlapTable("T", {"X": shares}).tables()
    assert table.rows[0] == ("a", "0.50", "0.33", "0.00")
