"""Random generators derived from the run's seed and the purpose of each draw.

A purpose names the client, round, step, tensor, ... that a draw is for. Therefore, no generator
state has to be saved, and draws do not depend on crashes, the engine or the order of clients.

None of these draws is secret: the server knows the run's seed, and PyTorch's CPU generator uses
only 32 bits of its seed. Noise and masks come from `coterie.privacy.stream`.
"""

from hashlib import blake2b

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Create the CPU random number generator for the random draw that `purpose` identifies.

    Two generators that are created with equal arguments give equal draws.

    Callers draw on the CPU and move the result to the device, because the generators of other
    devices produce other numbers.

    Args:
        seed: The run's seed.
        *purpose: Words and numbers that identify the draw.
    """
    key = repr((seed, *purpose)).encode()
    number = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number & (2**63 - 1))
