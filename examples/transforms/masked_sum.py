"""A toy of secure aggregation (Bonawitz et al., CCS 2017): the server sees only the sum.

Before every round clients exchange public keys. Each pair of clients derives a mask that one adds
and the other subtracts, so masks cancel in the sum. Nobody may drop out, and the server must relay
keys honestly: the protocol of the paper repairs both, this toy does not.
"""

import hashlib
from functools import partial
from typing import ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from coterie.aggregation.transform import Reduction, mapped
from coterie.errors import CoterieError
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

    def schema(self, schema):
        return self.retyped(schema, "int64")

    def answer(self, phase, context):
        chance = context.generator("key", {})
        key = bytes(torch.randint(256, (32,), generator=chance).tolist())
        context.memory.values["key"] = key.hex()
        return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()

    def collect(self, phase, answers, memory):
        memory.values["keys"] = dict(answers)

    def tell(self, phase, client, clients, memory):
        keys = memory.values.get("keys", {})
        return None if phase == "keys" else {name: keys[name] for name in clients if name in keys}

    def encode(self, update, context):
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(context.memory.values["key"]))
        masked = mapped(update, lambda t: (t.double().cpu() * ONE).round().long())
        for peer, key in sorted(context.told.items()):
            if peer != context.client:
                shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
                seed = int.from_bytes(hashlib.sha256(shared).digest()[:8], "big")
                chance = generator(seed, "mask", context.exchange)
                add = partial(add_mask, chance=chance, sign=1 if context.client < peer else -1)
                masked = mapped(masked, add)
        return masked

    def reduce(self, contributions, memory):
        uploads = list(contributions)
        if {u.client for u in uploads} != set(memory.values["keys"]):
            raise CoterieError("masked_sum needs the upload of every client of the round.")
        first = uploads[0].groups
        return {
            g: {n: (sum(u.groups[g][n] for u in uploads) / ONE / len(uploads)).float() for n in ts}
            for g, ts in first.items()
        }


def add_mask(tensor, chance, sign):
    """Return a tensor plus or minus a mask, modulo 2^64."""
    return tensor + sign * torch.randint(-(2**63), 2**63 - 1, tensor.shape, generator=chance)
