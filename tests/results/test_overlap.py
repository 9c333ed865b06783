"""The overlap of vocabularies."""

import torch

from coterie.data.tokens import ClientData, Tokens
from coterie.federation import Participant
from coterie.results.overlap import OverlapTable, jaccard


def participant(name: str, *ids: int) -> Participant:
    train, other = (Tokens(torch.tensor(t, dtype=torch.int32), 9) for t in (ids, (7, 8)))
    return Participant(name, ClientData(train, other, other), {name: other})


def test_jaccard_by_hand() -> None:
    """Of the training texts alone, each token counted once."""
    shares = jaccard([participant("a", 1, 2, 2, 3), participant("b", 3, 2, 4), participant("c", 5)])
    assert shares["a"] == {"a": 1, "b": 2 / 4, "c": 0}
    assert shares["b"] == {"a": 2 / 4, "b": 1, "c": 0}
    (table,) = OverlapTable("T", {"X": shares}).tables()
    assert table.rows[0] == ("a", "1.00", "0.50", "0.00")
