"""Quantisation of updates to eight bits in both directions, with error feedback.

Error feedback (Karimireddy et al., arXiv 1901.09847) adds the rounding error of an exchange to the
update of the next.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.messages import Field, Groups, Schema
from coterie.transforms.contract import Context, Transform


class Int8(Transform):
    name: ClassVar[str] = "int8"
    summary: ClassVar[str] = "updates in 8 bits, with error feedback"
    downloads: ClassVar[bool] = True

    def schema(self, schema: Schema) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.covered(schema)
        schema = self.retyped(schema, "int8")
        scales = tuple(Field(f"{g}.scale", "scales of 8-bit numbers") for g in sorted(groups))
        return replace(schema, up=(*schema.up, *scales), down=(*schema.down, *scales))

    def encode(self, update: Groups, context: Context) -> dict[str, dict[str, Tensor]]:
        payload: dict[str, dict[str, Tensor]] = {}
        for group, tensors in update.items():
            errors = context.memory.groups.get(group, {})
            wanted = {n: t + errors[n] if n in errors else t for n, t in tensors.items()}
            scales = {n: t.abs().amax().clamp(min=1e-30) / 127 for n, t in wanted.items()}
            payload[group] = {n: (t / scales[n]).round().to(torch.int8) for n, t in wanted.items()}
            payload[f"{group}.scale"] = scales
            sent = self.decode({g: payload[g] for g in (group, f"{group}.scale")}, context)[group]
            context.memory.groups[group] = {n: t - sent[n] for n, t in wanted.items()}
        return payload

    def decode(self, payload: Groups, context: Context) -> dict[str, dict[str, Tensor]]:
        groups = [group for group in payload if f"{group}.scale" in payload]
        return {
            group: {n: t * payload[f"{group}.scale"][n] for n, t in payload[group].items()}
            for group in groups
        }
