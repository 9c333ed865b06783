"""Chance is counted, not carried: every random draw names what it is for.

A generator is made from the run's seed and the purpose of the draw (client, round, step, tensor
name, ...), so there is no generator state to save, and neither a crash, nor another engine, nor
another order of clients can change a draw.
"""

from hashlib import blake2b

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose of one run; equal arguments give equal draws.

    Draw on the CPU and move the result: generators of other devices give other numbers.
    """
    key = repr((seed, *purpose)).encode()
    number = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number & (2**63 - 1))
