"""A toy of secure aggregation (Bonawitz et al., CCS 2017): the server sees only the sum.

Before every round clients exchange public keys. Each pair of clients derives a mask that one adds
and the other subtracts, so masks cancel in the sum. Nobody may drop out, and the server must relay
keys honestly: the protocol of the paper repairs both, this toy does not.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from coterie.aggregation.transform import Context, Contribution, Memory, Reduction, mapped
from coterie.errors import CoterieError
from coterie.messages import Groups, Json, MessageError, Schema
from coterie.seeding import generator

ONE = 2.0**32
"""The integer that stands for 1."""


class MaskedSum(Reduction):
    name: ClassVar[str] = "masked_sum"
    summary: ClassVar[str] = "uploads under pairwise masks that cancel in their sum"
    private: ClassVar[bool] = True
    sealed: ClassVar[bool] = True
    before: ClassVar[tuple[str, ...]] = ("keys",)
    least: ClassVar[int] = 2

    def schema(self, schema: Schema) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.retyped(schema, "int64")

    def answer(self, phase: str, context: Context) -> str:
        chance = context.generator("key", {})
        key = hashlib.sha256(chance.initial_seed().to_bytes(8, "big")).digest()
        context.memory.values["key"] = key.hex()
        return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        if not (isinstance(answer, str) and re.fullmatch("[0-9a-f]{64}", answer)):
            raise MessageError(f"{client} sent no public key.")
        memory.values["keys"] = {**memory.values.get("keys", {}), client: answer}

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        keys = memory.values.get("keys", {})
        return None if phase == "keys" else {name: keys[name] for name in clients if name in keys}

    def encode(self, update: Groups, context: Context) -> Groups:
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(context.memory.values["key"]))
        masked = mapped(update, lambda t: (t.double().cpu() * ONE).round().long())
        for peer, key in sorted(context.server_value.items()):
            if peer != context.client:
                shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
                seed = int.from_bytes(hashlib.sha256(shared).digest()[:8], "big")
                chance = generator(seed, "mask", context.exchange)
                add = partial(add_mask, chance=chance, sign=1 if context.client < peer else -1)
                masked = mapped(masked, add)
        return masked

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        uploads = list(contributions)
        if [upload.client for upload in uploads] != sorted(clients):
            raise CoterieError("masked_sum needs the upload of every client of the round.")
        return {
            group: {n: self._mean([u.groups[group][n] for u in uploads]) for n in tensors}
            for group, tensors in uploads[0].groups.items()
        }

    def _mean(self, masked: list[Tensor]) -> Tensor:
        return (torch.stack(masked).sum(0).double() / ONE / len(masked)).float()


def add_mask(tensor: Tensor, chance: torch.Generator, sign: int) -> Tensor:
    """Return a tensor plus or minus a mask, modulo 2^64."""
    return tensor + sign * torch.randint(-(2**63), 2**63 - 1, tensor.shape, generator=chance)
