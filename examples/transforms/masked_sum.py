"""A toy of secure aggregation (Bonawitz et al., CCS 2017): the server sees only the sum.

Before every round clients exchange public keys. Each pair of clients derives a mask that one adds
and the other subtracts, so masks cancel in the sum. Every attempt at a round has new masks, and a
client masks only one upload per attempt. Unlike the paper's protocol, this toy needs every client,
and a server that relays keys honestly.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from coterie.errors import CoterieError
from coterie.messages import Groups, Json, MessageError, Schema
from coterie.privacy import secrets
from coterie.privacy.stream import Stream
from coterie.transforms.contract import Context, Contribution, Memory, Reduction, mapped

ONE = 2.0**32
"""The integer that stands for 1."""


class MaskedSum(Reduction):
    name: ClassVar[str] = "masked_sum"
    summary: ClassVar[str] = "uploads under pairwise masks that cancel in their sum"
    private: ClassVar[bool] = True
    sealed: ClassVar[bool] = True
    forwards: ClassVar[str] = "public keys, from which masks are derived"
    before: ClassVar[tuple[str, ...]] = ("keys",)
    least: ClassVar[int] = 2

    def schema(self, schema: Schema) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.retyped(schema, "int64")

    def answer(self, phase: str, context: Context) -> str:
        key = context.stream("key", {}).bytes(32)
        context.memory.values["key"] = key.hex()
        return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        if not (isinstance(answer, str) and re.fullmatch("[0-9a-f]{64}", answer)):
            raise MessageError(f"{client} sent no public key.")
        memory.values["keys"] = {**memory.values.get("keys", {}), client: answer}

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        if phase == "keys":
            memory.values.pop("attempt", None)
            return None
        # A repeated exchange restores the memory that was saved after the phase `keys`.
        attempt = memory.values.setdefault("attempt", secrets.draw().hex())
        keys = memory.values.get("keys", {})
        return {"attempt": attempt, "keys": {name: keys[name] for name in clients if name in keys}}

    def encode(self, update: Groups, context: Context) -> Groups:
        own = X25519PrivateKey.from_private_bytes(bytes.fromhex(context.memory.values["key"]))
        attempt, keys = context.server_value["attempt"], context.server_value["keys"]
        if not context.masks_once(f"{context.exchange}:{attempt}", update):
            raise CoterieError("The server asks for another upload with masks that are used up.")
        masked = mapped(update, lambda t: (t.double() * ONE).round().long())
        for peer, key in sorted(keys.items()):
            if peer != context.client:
                shared = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
                stream = Stream(shared, "mask", context.exchange, attempt)
                add = partial(add_mask, stream=stream, sign=1 if context.client < peer else -1)
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


def add_mask(tensor: Tensor, stream: Stream, sign: int) -> Tensor:
    """Return a tensor plus or minus a mask, modulo 2^64."""
    return tensor + sign * stream.integers(tensor.shape)
