from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.kinds.text import Tokens, evaluation_windows, even_windows
from coterie.data.windows import sample_batch
from coterie.losses.tokens import Batch
from coterie.seeding import generator

CONTEXT = 99_999


def stream(count: int) -> Tokens:
    return Tokens(torch.arange(count, dtype=torch.int32), bytes=count)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_every_token_is_predicted_once_after_the_token_before_it(count, window, batch) -> None:
    seen: list[tuple[int, int]] = []
    for ids, mask in evaluation_windows(stream(count), window, CONTEXT, batch):
        assert ids.dtype == torch.int64
        assert ids.shape == (len(mask), window + 1)
        assert 1 <= len(mask) <= batch
        assert mask.shape == (len(ids), window)
        for row, keep in zip(ids.tolist(), mask.tolist(), strict=True):
            pairs = zip(row, row[1:], keep, strict=False)
            seen += [(given, wanted) for given, wanted, kept in pairs if kept]
    assert seen == [(i - 1 if i else CONTEXT, i) for i in range(count)]


def test_batches_are_windows_of_the_stream_at_every_offset_alike() -> None:
    tokens = stream(12)
    found = sample_batch(tokens, 8000, 9, generator(0, "batch"))
    assert isinstance(found, Batch)
    batch, counted, real = found
    assert counted is None
    assert real is None
    assert batch.shape == (8000, 10)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, batch[:, :1] + torch.arange(10))
    starts = torch.bincount(batch[:, 0], minlength=3)
    assert len(starts) == 3
    assert (starts / 8000 - 1 / 3).abs().max() < 0.03


def test_batches_follow_their_generator() -> None:
    first, again, other = (
        sample_batch(stream(1000), 16, 8, generator(seed, "batch")).ids for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_split_of_one_window_suffices() -> None:
    batch = sample_batch(stream(9), 4, 8, generator(0, "batch")).ids
    assert torch.equal(batch, torch.arange(9).expand(4, 9))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 70))
def test_an_even_windows_is_windows_of_the_whole_evenly_spaced(count, window, most) -> None:
    [(ids, mask)] = evaluation_windows(stream(count), window, CONTEXT, 60)
    rows = len(ids)
    chosen = [n * rows // min(most, rows) for n in range(min(most, rows))]
    assert chosen[0] == 0
    assert len({*chosen}) == len(chosen)
    steps = {after - before for before, after in pairwise([*chosen, rows])}
    assert max(steps) - min(steps) <= 1
    batch = even_windows(stream(count), most, window, CONTEXT)
    assert torch.equal(batch.ids, ids[chosen])
    assert batch.counted is not None
    assert torch.equal(batch.counted, mask[chosen])
    assert batch.real is None
