"""FedAMoLE's layers as a loop over tokens and experts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from coterie.adapters import AmoleLayout


class NaiveAmole(nn.Module):
    """The formula, one token and one expert at a time; p: what travels, by name.

    There may be dropout masks, (tokens, in): first that of the shared pair, if there is one, and
    then those of the experts.
    """

    def __init__(
        self,
        linear: nn.Module,
        path: str,
        layout: AmoleLayout,
        held: Sequence[int],
        p: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.linear, self.path, self.layout, self.held, self.p = linear, path, layout, held, p
        self.masks: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.chosen: list[list[int]] = []
        self.weights: list[list[float]] = []

    def score(self, x: Tensor, masked: Tensor, expert: int) -> Tensor:
        p, path, layout = self.p, self.path, self.layout
        if layout.router == "vanilla":
            return p[f"gate/{path}"][expert] @ x
        product = (p[f"projection/{path}"] @ x) @ (p[f"domain.{expert}/{path}.A"] @ masked)
        return product / (layout.rank if layout.score_scale == "rank" else len(x)) ** 0.5

    def correction(self, x: Tensor, number: int) -> Tensor:
        """Return the sum of all experts' outputs, (out,), for x, (in,)."""
        p, path = self.p, self.path
        xs = [x * mask[number] for mask in self.masks] or [x] * (len(self.held) + 1)
        y = torch.zeros(self.linear(x).shape, dtype=x.dtype)
        if self.layout.shared:
            y = y + p[f"shared/{path}.B"] @ (p[f"shared/{path}.A"] @ xs[0])
        if self.held:
            xs = xs[-len(self.held) :]
            scores = [self.score(x, m, e) for m, e in zip(xs, self.held, strict=True)]
            softmax = torch.stack(scores).softmax(0)
            best = sorted(range(len(self.held)), key=lambda j: -softmax[j].item())
            best = best[: self.layout.top_k]
            scaled = self.layout.renormalise and self.layout.top_k > 1
            total = sum(softmax[j] for j in best) if scaled else 1
            self.scores.append(softmax)
            self.chosen.append(best)
            self.weights.append([0.0] * len(self.held))
            for j in best:
                A, B = (p[f"domain.{self.held[j]}/{path}.{end}"] for end in "AB")
                y = y + softmax[j] / total * (B @ (A @ xs[j]))
                self.weights[-1][j] = float((softmax[j] / total).detach())
        return self.layout.alpha / self.layout.rank * y

    def forward(self, x: Tensor) -> Tensor:
        self.scores, self.chosen, self.weights = [], [], []
        tokens = x.flatten(0, -2)
        added = torch.stack([self.correction(token, n) for n, token in enumerate(tokens)])
        return self.linear(x) + added.view(*x.shape[:-1], -1)

    def load_balance(self, real: Sequence[int]) -> Tensor:
        n = len(self.held)
        counted = self.layout.top_k if self.layout.load == "top_k" else 1
        chosen = [j for i in real for j in self.chosen[i][:counted]]
        P = torch.stack([self.scores[i] for i in real]).mean(0)
        return n * sum((chosen.count(j) / len(chosen) * P[j] for j in range(n)), torch.tensor(0.0))
