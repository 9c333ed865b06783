"""A toy of secure aggregation (Bonawitz et al., CCS 2017): the server sees only the sum.

Before every exchange, clients exchange public keys. Each pair of clients derives a mask that one
adds and the other subtracts, so these masks cancel in the sum. Each client adds a mask of its own.
After the uploads, the server says whose uploads have arrived. These clients then reveal their own
masks, and the masks that they share with clients whose uploads are missing. Unlike in the paper's
protocol, every client whose upload has arrived must answer, and the server must be honest: it could
tell clients different names.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

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
    summary: ClassVar[str] = "uploads under masks that can be removed only from their sum"
    private: ClassVar[bool] = True
    sealed: ClassVar[bool] = True
    forwards: ClassVar[str] = "public keys, from which masks are derived"
    before: ClassVar[tuple[str, ...]] = ("keys",)
    after: ClassVar[tuple[str, ...]] = ("unmask",)
    least: ClassVar[int] = 2

    def schema(self, schema: Schema) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.retyped(schema, "int64")

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        if phase == "keys":
            memory.values.clear()
            return None
        if phase == "unmask":
            if len(clients) < self.least:
                raise CoterieError(f"masked_sum needs uploads of at least {self.least} clients.")
            return sorted(clients)
        # A repeated exchange restores the memory that was saved after the phase `keys`.
        attempt = memory.values.setdefault("attempt", secrets.draw().hex())
        keys = memory.values.get("keys", {})
        return {"attempt": attempt, "keys": {name: keys[name] for name in clients if name in keys}}

    def answer(self, phase: str, context: Context) -> Json:
        if phase == "unmask":
            return self._seeds(context)
        key = context.stream("key", {}).bytes(32)
        context.memory.values["key"] = key.hex()
        return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()

    def encode(self, update: Groups, context: Context) -> Groups:
        attempt, keys = context.server_value["attempt"], context.server_value["keys"]
        if context.client not in keys:
            raise CoterieError("The server has no key of this client for masks of this exchange.")
        nonce = f"{context.turn.number}:{attempt}"
        if not context.masks_once(nonce, update):
            raise CoterieError("The server asks for another upload with masks that are used up.")
        own = X25519PrivateKey.from_private_bytes(bytes.fromhex(context.memory.values["key"]))
        seeds = {context.client: context.stream(f"own mask {nonce}", update).bytes(32).hex()}
        for peer in sorted(keys.keys() - {context.client}):
            shared = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(keys[peer])))
            seeds[peer] = Stream(shared, "mask", nonce).bytes(32).hex()
        context.memory.values |= {"nonce": nonce, "seeds": seeds}
        masked = mapped(update, lambda tensor: (tensor.double() * ONE).round().long())
        for peer, seed in seeds.items():
            masked = with_mask(masked, seed, -1 if peer < context.client else 1)
        return masked

    def _seeds(self, context: Context) -> Json:
        """Return the client's own seed, and those that it shares with clients without an upload."""
        seeds, uploaded = context.memory.values["seeds"], {*context.server_value}
        if context.client not in uploaded or len(uploaded & seeds.keys()) < self.least:
            raise CoterieError("The server asks for masks that hide a single upload.")
        if not context.masks_once(f"unmask {context.memory.values['nonce']}", {}):
            raise CoterieError("The server asks for the masks of other clients than before.")
        hidden = uploaded - {context.client}
        return {name: seed for name, seed in seeds.items() if name not in hidden}

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        keys = cast("dict[str, Json]", answer if phase == "unmask" else {client: answer})
        if type(keys) is not dict or client not in keys or not all(map(is_key, keys.values())):
            raise MessageError(f"{client} sent no valid answer in the phase {phase!r}.")
        memory.values[phase] = {**memory.values.get(phase, {}), client: answer}

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        uploads = {upload.client: upload.groups for upload in contributions}
        answers: dict[str, dict[str, str]] = memory.values.get("unmask", {})
        if missing := uploads.keys() - answers.keys():
            raise CoterieError(
                f"masked_sum needs an answer of {', '.join(sorted(missing))}, whose uploads have "
                "arrived."
            )
        masked = [uploads[client] for client in sorted(uploads)]
        total: Groups = {
            group: {name: torch.stack([each[group][name] for each in masked]).sum(0) for name in ts}
            for group, ts in masked[0].items()
        }
        for client in uploads:
            for peer, seed in answers[client].items():
                total = with_mask(total, seed, 1 if peer < client else -1)
        return mapped(total, lambda tensor: (tensor.double() / ONE / len(masked)).float())


def with_mask(groups: Groups, seed: str, sign: int) -> dict[str, dict[str, Tensor]]:
    """Return tensors plus or minus the mask that is derived from a seed, modulo 2^64."""
    stream = Stream(bytes.fromhex(seed), "mask")
    masks = {
        (group, name): stream.integers(groups[group][name].shape)
        for group in sorted(groups)
        for name in sorted(groups[group])
    }
    return {
        group: {name: tensor + sign * masks[group, name] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def is_key(value: Any) -> bool:
    """Return whether a value is a public key or a seed."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
