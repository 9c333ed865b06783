"""Local differential privacy: each client clips its update and adds Gaussian noise itself.

Two texts of a client are neighbours whatever they contain, so replacing all of a client's text
changes the clipped update by at most twice the norm. Uploads of a run compose as one Gaussian
mechanism (Dong et al., arXiv 1905.02383); the client's ledger counts them.
"""

import math
from typing import ClassVar

import torch
from pydantic import Field

from coterie.messages import Groups
from coterie.privacy.ledger import Budget
from coterie.privacy.mechanisms import noise_for
from coterie.transforms.contract import Context, Transform, mapped


class ClippedGaussian(Transform):
    name: ClassVar[str] = "clipped_gaussian"
    summary: ClassVar[str] = "updates are clipped, and Gaussian noise is added"
    private: ClassVar[bool] = True

    norm: float = Field(default=1.0, gt=0, description="largest L2 norm of an update")
    epsilon: float = Field(default=8.0, gt=0, description="privacy budget of a client's text")
    delta: float = Field(default=1e-5, gt=0, lt=1, description="probability of failure")

    def budget(self, exchanges: int) -> Budget:
        return Budget(self.epsilon, self.delta, "updates from all of this client's text")

    def encode(self, update: Groups, context: Context) -> Groups:
        noise = noise_for(self.epsilon, context.exchanges, self.delta)
        if not context.spend(update, noise, context.exchanges):  # nothing but noise from now on
            update = mapped(update, torch.zeros_like)
        stream = context.stream("noise", update)
        tensors = [tensor for group in update.values() for tensor in group.values()]
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
        factor, deviation = min(1.0, self.norm / max(norm, 1e-30)), 2 * self.norm * noise
        return mapped(
            update, lambda tensor: stream.with_noise(tensor.double() * factor, deviation).float()
        )
