"""Streams of secret numbers: key sizes, distributions, and attacks by trying all keys."""

import struct
from collections.abc import Callable
from functools import cache
from hashlib import blake2b

import numpy as np
import pytest
import torch
from scipy import stats

from coterie.privacy.ledger import Ledger
from coterie.privacy.mechanisms import private_mean
from coterie.privacy.secrets import KEY_BYTES, Secrets, draw
from coterie.privacy.stream import SPACING, Stream, rounded, spacing_of
from coterie.transforms.context import Context, Memory
from coterie.turn import Turn

NORM, DEVIATION, SIZE = 1.0, 2.0, 64


def stream(number: int, *purpose: str | int) -> Stream:
    return Stream(number.to_bytes(KEY_BYTES, "big"), *purpose)


def with_torch(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Add noise from PyTorch's generator, which must not be used."""
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values + DEVIATION * noise


def with_cipher(values: torch.Tensor, key: int) -> torch.Tensor:
    return stream(key).with_noise(values, DEVIATION)


@cache
def noises(add_noise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the noise of all keys of 12 bits, (4096, SIZE)."""
    zero = torch.zeros(SIZE, dtype=torch.float64)
    return torch.stack([add_noise(zero, key) for key in range(2**12)])


def searched(add_noise: Callable[..., torch.Tensor], upload: torch.Tensor) -> list[int]:
    """Return all keys of 12 bits whose noise turns an upload into a clipped update."""
    norms = (upload - noises(add_noise)).norm(dim=1)
    return (norms <= NORM * (1 + 1e-6)).nonzero().flatten().tolist()


@pytest.mark.parametrize("add_noise", [with_torch, with_cipher])
def test_a_search_finds_a_key_of_12_bits(add_noise) -> None:
    update = torch.nn.functional.normalize(torch.arange(SIZE, dtype=torch.float64) - 20, dim=0)
    upload = add_noise(update, 3247)
    assert searched(add_noise, upload) == [3247]
    recovered = upload - noises(add_noise)[3247]
    assert torch.cosine_similarity(recovered, update, dim=0) > 0.999


def test_a_search_of_12_bits_finds_no_real_key() -> None:
    upload = Stream(draw()).with_noise(torch.zeros(SIZE), DEVIATION)
    assert searched(with_cipher, upload) == []


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 64, 127, 128, 255])
def test_every_bit_of_a_key_changes_the_numbers(bit) -> None:
    # PyTorch's generator gives equal numbers for seeds that are equal in their low 32 bits.
    assert stream(5).bytes(16) != stream(5 ^ (1 << bit)).bytes(16)
    if 32 <= bit < 63:
        zero = torch.zeros(SIZE, dtype=torch.float64)
        assert torch.equal(with_torch(zero, 5), with_torch(zero, 5 ^ (1 << bit)))


def test_secrets_have_at_least_128_bits() -> None:
    keys = {draw() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) * 8 >= 128 for key in keys)
    assert len(Secrets().of(0)) * 8 >= 128


def test_a_transforms_stream_depends_on_secret_exchange_purpose_update_and_transform() -> None:
    secrets, update = Secrets(), {"adapter": {"A": torch.ones(3)}}
    other = {"adapter": {"A": torch.ones(3) + 1e-6}}

    def first(name: str, exchange: int, key: Secrets, purpose: str, tensors=update) -> bytes:
        turn, more = Turn(exchange, exchange, exchange), {"secrets": key, "ledger": Ledger()}
        context = Context(name, "ada", turn, 4, "up", Memory(), **more)
        return context.stream(purpose, tensors).bytes(16)

    values = [first("dp", 0, secrets, purpose) for purpose in ("noise", "release")]
    values += [first("dp", 0, secrets, "noise", other), first("masks", 0, secrets, "noise")]
    values += [first("dp", 0, Secrets(), "noise"), first("dp", 1, secrets, "noise")]
    assert len(set(values)) == len(values)
    assert first("dp", 1, secrets, "noise") == values[-1]


def test_equal_arguments_give_equal_numbers_and_purposes_differ() -> None:
    assert stream(1, "a", 2).bytes(32) == stream(1, "a", 2).bytes(32)
    purposes = [("a", 2), ("a", 3), ("b", 2), ("a2",), ("a", "2"), ()]
    assert len({stream(1, *purpose).bytes(16) for purpose in purposes}) == len(purposes)


def block(key: bytes, counter: int) -> bytes:
    """Return a block of ChaCha20 with a nonce of zeros (RFC 8439, section 2.3)."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter]
    start += [0, 0, 0]
    quarters = [(i, i + 4, i + 8, i + 12) for i in range(4)]
    quarters += [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    state = [*start]
    for a, b, c, d in quarters * 10:
        for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) % 2**32
            mixed = state[z] ^ state[x]
            state[z] = (mixed << turn | mixed >> (32 - turn)) % 2**32
    return struct.pack("<16I", *((x + y) % 2**32 for x, y in zip(state, start, strict=True)))


def test_bytes_are_those_of_chacha20_with_a_hash_of_key_and_purpose() -> None:
    key = blake2b(b"('noise', 3)", key=(5).to_bytes(32, "big"), digest_size=32).digest()
    source = stream(5, "noise", 3)
    parts = [source.bytes(5), source.bytes(0), source.bytes(123)]
    assert b"".join(parts) == block(key, 0) + block(key, 1)


def test_integers_are_uniform_over_64_bits() -> None:
    numbers = stream(7).integers((3, 40_000))
    assert (numbers.shape, numbers.dtype) == ((3, 40_000), torch.int64)
    bits = np.unpackbits(numbers.numpy().view(np.uint8)).reshape(-1, 64)
    ones = bits.mean(axis=0)  # of each of the 64 bits
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / len(bits) ** 0.5


def test_noise_is_gaussian_also_in_its_tails() -> None:
    count, deviation = 1_000_000, 0.37
    noise = stream(8).with_noise(torch.zeros(count), deviation).numpy() / deviation
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    tail, expected = np.abs(noise[np.abs(noise) > 3]), stats.truncnorm(3, np.inf)
    assert stats.kstest(tail, expected.cdf).pvalue > 1e-3
    assert np.abs(noise).max() == pytest.approx(4.9, abs=0.8)  # the largest of a million
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 5 / count**0.5


class Words(Stream):
    """A stream whose next 64-bit words are given."""

    def __init__(self, words: list[int]) -> None:
        self.data = b"".join(word.to_bytes(8, "little") for word in words)

    def bytes(self, count: int) -> bytes:
        data, self.data = self.data[:count], self.data[count:]
        return data


@pytest.mark.parametrize(
    ("high", "low", "value"),
    [
        (0, 0, stats.norm.isf(2.0**-128)),
        (0, 2**63, stats.norm.isf(2.0**-65)),
        (2**63, 2**63, -stats.norm.isf(2.0**-65)),
        (2**62, 0, stats.norm.isf(0.25)),
        (2**63 - 1, 2**64 - 1, 0.0),
        (2**64 - 1, 2**64 - 1, 0.0),
    ],
)
def test_128_bits_become_a_normally_distributed_number(high, low, value) -> None:
    drawn = Words([high, low]).with_noise(torch.zeros(1), 1.0)
    assert drawn.item() == pytest.approx(value, abs=SPACING)


@pytest.mark.parametrize("deviation", [1e-9, 0.3, 1.0, 1.5, 4096.0])
def test_every_result_is_a_multiple_of_the_spacing(deviation) -> None:
    # The low bits of a sum of unrounded numbers would reveal the value without noise.
    spacing = spacing_of(deviation)
    assert 2**-13 < spacing / deviation <= 2**-12
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * deviation
    noisy = stream(9).with_noise(values, deviation)
    assert torch.equal(noisy / spacing, (noisy / spacing).round())
    shrunk = rounded(values, deviation)
    assert (shrunk.abs() <= values.double().abs()).all()
    assert (values.double() - shrunk).abs().max() < spacing
    assert torch.equal(noisy - shrunk, stream(9).with_noise(torch.zeros(1000), deviation))


def test_one_record_moves_a_rounded_mean_by_its_share_at_most() -> None:
    # If the mean were rounded instead of its summands, rounding could add to the difference.
    clip, noise, records, dim = 1.0, 500.0, 3, 2000
    samples = torch.full((records, dim), 0.4)
    changed = samples.clone()
    changed[0] *= -1
    means = [private_mean(s, clip, noise, stream(3)).double() for s in (samples, changed)]
    assert (means[0] - means[1]).norm() <= 2 * clip / records * (1 + 1e-6)
