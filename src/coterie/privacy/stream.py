"""Reproducible secret random numbers from a stream cipher.

PyTorch's generators must not draw secrets: on a CPU, they use only 32 bits of their seed, and all
seeds can be tried in minutes. Here, a receiver who does not know the key cannot distinguish the
numbers from truly random numbers.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.special import ndtri
from torch import Tensor

NONCE = bytes(16)
"""The cipher's nonce, which is constant because every stream has a key of its own."""
SPACING = 2.0**-12
"""The distance between two possible values of noise, relative to its standard deviation. The
standard deviation is first rounded down to a power of 2."""


def spacing_of(deviation: float) -> float:
    """Return the distance between two possible values of noise, which is a power of 2."""
    return 2.0 ** math.floor(math.log2(deviation)) * SPACING


def rounded(values: Tensor, deviation: float) -> Tensor:
    """Round values towards 0 to multiples of the spacing of noise.

    Values with a norm of at most C have a norm of at most C after rounding. To round a sum in this
    way, round each summand: the result then changes by at most 2 C if one summand is replaced.

    Args:
        values: The values.
        deviation: Standard deviation of the noise that will be added.

    Returns:
        A float64 tensor on the CPU, with the shape of `values`.
    """
    spacing = spacing_of(deviation)
    return (values.detach().cpu().double() / spacing).trunc_() * spacing


class Stream:
    """Random numbers from the stream cipher ChaCha20 (RFC 8439).

    Streams with equal arguments give equal numbers.

    Args:
        key: A secret key of 32 bytes.
        *purpose: Words and numbers that identify the draw.
    """

    def __init__(self, key: bytes, *purpose: str | int) -> None:
        own = blake2b(repr(purpose).encode(), key=key, digest_size=32).digest()
        self._cipher = Cipher(ChaCha20(own, NONCE), mode=None).encryptor()

    def bytes(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        return self._cipher.update(bytes(count))

    def integers(self, shape: Sequence[int]) -> Tensor:
        """Return an int64 tensor, whose values are uniform over all 2^64 integers."""
        return torch.from_numpy(self._words(math.prod(shape)).view(np.int64)).view(tuple(shape))

    def with_noise(self, values: Tensor, deviation: float) -> Tensor:
        """Round values with `rounded`, and add Gaussian noise.

        The noise is rounded to the nearest multiple of the same spacing. The result therefore
        equals the sum of the rounded values and real-valued noise, rounded to the nearest multiple:
        it reveals no more than this sum, and the low bits of its floating-point numbers reveal
        nothing (Mironov, On significance of the least significant bits for differential privacy,
        CCS 2012).

        Args:
            values: The values, which must have a bounded sensitivity after `rounded`.
            deviation: Standard deviation of the noise, greater than 0.

        Returns:
            A float64 tensor on the CPU, with the shape of `values`.
        """
        spacing = spacing_of(deviation)
        noise = (self._normal(values.shape) * (deviation / spacing)).round_()
        return rounded(values, deviation) + noise * spacing

    def _normal(self, shape: Sequence[int]) -> Tensor:
        """Return a float64 tensor of normally distributed values, from 128 bits for each value.

        One bit is the sign. The other 127 bits are a uniform number p between 0 and 1/2, and the
        value's magnitude is minus the quantile of p. Even far tails are therefore complete.
        """
        high, low = self._words(2 * math.prod(shape)).reshape(2, -1)
        signs = 1 - 2.0 * (high >> np.uint64(63))
        bits = (high & np.uint64(2**63 - 1)).astype(np.float64) + low.astype(np.float64) * 2.0**-64
        values = torch.from_numpy(signs * -ndtri(np.maximum(bits, 2.0**-64) * 2.0**-64))
        return values.view(tuple(shape))

    def _words(self, count: int) -> np.ndarray:
        return np.frombuffer(bytearray(self.bytes(8 * count)), dtype="<u8").astype(np.uint64)
