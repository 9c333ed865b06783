"""Experts choose their clients: FedAMoLE's reverse selection, solved exactly.

FedAMoLE (arXiv 2411.19128, reverse selection-based expert assignment, RSEA). For every module
that carries experts, maximise `sum P * D` over D in {0, 1}^(E x C), P the relevance of E experts
for C clients, so that every expert chooses k_c clients and every client gets k_e to b experts. The
constraints are those of a bounded transportation problem, a totally unimodular matrix with whole
bounds: a vertex of the linear relaxation is whole, so the simplex method finds the exact optimum.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import linprog
from scipy.special import softmax
from torch import Tensor

from coterie.errors import CoterieError

TOLERANCE = 1e-10
"""Of reduced costs, where the largest score is 1: the finest that HiGHS takes."""


@dataclass(frozen=True)
class Bounds:
    """How many clients an expert has, and experts a client, per module."""

    clients_per_expert: int
    """k_c, 1 or more: exactly so many."""
    least: int
    """k_e, 0 or more: experts that each client has at least."""
    most: int
    """b: experts that each client has at most."""

    def refuse(self, experts: int, clients: int) -> None:
        """Raise CoterieError unless `C k_e <= E k_c <= C min(b, E)` and `k_c <= C`.

        These hold exactly when there is an assignment of E experts to C clients.
        """
        E, C, k_c = experts, clients, self.clients_per_expert
        if k_c > C:
            raise CoterieError(
                f"Each expert is to choose {k_c} clients, but there are only {C}; lower "
                f"clients_per_expert (k_c) to at most {C}."
            )
        if C * self.least > E * k_c:
            raise CoterieError(
                f"Too few experts for all clients: C * k_e <= E * k_c fails, as {C} clients * at "
                f"least {self.least} experts = {C * self.least}, but {E} experts * {k_c} clients "
                f"= {E * k_c}; lower min_experts (k_e) to at most {E * k_c // C}, or raise "
                "clients_per_expert (k_c) or experts (E)."
            )
        if E * k_c > C * self.most:  # never for b >= E, as k_c <= C here
            raise CoterieError(
                f"Too many experts for all clients: E * k_c <= C * min(b, E) fails, as {E} "
                f"experts * {k_c} clients = {E * k_c}, but {C} clients * at most {self.most} "
                f"experts = {C * self.most}; raise max_experts (b) to at least "
                f"{-(-E * k_c // C)}, or lower clients_per_expert (k_c) or experts (E)."
            )

    def relaxed(self, experts: int, clients: int) -> "Bounds":
        """The nearest bounds that can be met, for when clients drop out or join.

        In this order: k_c falls to at most C, b rises to at least E k_c / C rounded up, k_e falls
        to at most E k_c / C rounded down. Bounds that can be met come back unchanged.
        """
        k_c = min(self.clients_per_expert, clients)
        share = experts * k_c
        return Bounds(k_c, min(self.least, share // clients), max(self.most, -(-share // clients)))

    def homogeneous(self, experts: int, clients: int) -> "Bounds":
        """The same k_c, with equally many experts for every client, or one more or less.

        The paper's ablation. Only k_c can still be too large.
        """
        share = experts * self.clients_per_expert
        return replace(self, least=share // clients, most=-(-share // clients))


def relevance(expert_embeddings: np.ndarray, token_embeddings: np.ndarray, dim: int) -> np.ndarray:
    """P: (experts, clients), float64: how much each expert prefers each client.

    The softmax over clients of `e_j . t_c / sqrt(dim)`, for the mean embeddings of experts,
    (experts, r), and of clients' tokens, (clients, r); dim: r, or the layer's width as in the paper
    (equation 20).
    """
    experts, tokens = (np.asarray(e, np.float64) for e in (expert_embeddings, token_embeddings))
    return softmax(experts @ tokens.T / math.sqrt(dim), axis=1)


def relevance_of_known(
    experts: Sequence[Tensor | None], clients: Sequence[Tensor | None], dim: int
) -> np.ndarray:
    """The relevance by mean embeddings, (r,) each, of which some are not known: None.

    Such an expert prefers all clients alike; such a client counts as the mean of the others.
    """
    known = torch.stack([tokens for tokens in clients if tokens is not None])
    mean, nothing = known.mean(0), torch.zeros_like(known[0])
    embeddings = torch.stack([nothing if e is None else e for e in experts])
    tokens = torch.stack([mean if t is None else t for t in clients])
    return relevance(embeddings.numpy(), tokens.numpy(), dim)


def assign(scores: np.ndarray, bounds: Bounds) -> np.ndarray:
    """The best assignment of one module: (experts, clients), bool.

    scores: (experts, clients), finite, of any scale. Equal scores give equal assignments, whatever
    the number of threads; among equally good ones the solver's fixed order decides.
    Raises CoterieError if the bounds cannot be met.
    """
    E, C = scores.shape
    bounds.refuse(E, C)
    # A row's sum is fixed, so this changes no optimum; the solver's tolerance is absolute.
    gains = np.asarray(scores, np.float64) - scores.min(axis=1, keepdims=True)
    gains /= gains.max() or 1.0
    # Variables are D, row by row, and how far each client is below b: half as many rows as with
    # two inequalities per client, and about twice as fast.
    rows = sparse.kron(sparse.eye_array(E), np.ones((1, C)))
    columns = sparse.kron(np.ones((1, E)), sparse.eye_array(C))
    highest = np.concatenate([np.ones(E * C), np.full(C, bounds.most - bounds.least)])
    result = linprog(
        np.concatenate([-gains.ravel(), np.zeros(C)]),
        A_eq=sparse.block_array([[rows, None], [columns, sparse.eye_array(C)]], format="csc"),
        b_eq=np.repeat([bounds.clients_per_expert, bounds.most], [E, C]),
        bounds=np.stack([np.zeros_like(highest), highest], axis=1),
        method="highs-ds",
        options={"dual_feasibility_tolerance": TOLERANCE},
    )
    if result.status != 0:
        raise RuntimeError(f"the assignment solver failed: {result.message}")
    return _whole(result.x[: E * C].reshape(E, C), bounds)


def assign_all(scores: Mapping[str, np.ndarray], bounds: Bounds) -> dict[str, np.ndarray]:
    """The best assignment of every module, by name; see `assign`.

    Modules are solved side by side, in as many threads as torch may use: HiGHS lets go of Python's
    lock, and each programme is solved in one thread, so the result does not depend on their number.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        solved = pool.map(lambda one: assign(one, bounds), scores.values())
        return dict(zip(scores, solved, strict=True))


def _whole(solution: np.ndarray, bounds: Bounds) -> np.ndarray:
    """The solver's (experts, clients) as bool; RuntimeError if it is no assignment."""
    chosen = solution > 0.5
    held = chosen.sum(axis=0)
    if not (
        np.abs(solution - chosen).max() < 1e-6
        and (chosen.sum(axis=1) == bounds.clients_per_expert).all()
        and (held >= bounds.least).all()
        and (held <= bounds.most).all()
    ):
        raise RuntimeError("the solver's assignment is not integral or violates its bounds")
    return chosen
