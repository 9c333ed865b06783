"""Assignment of experts to clients by FedAMoLE's reverse selection, solved exactly.

FedAMoLE (arXiv 2411.19128) calls this method reverse selection-based expert assignment (RSEA). For
each module with experts, the method maximises `sum P * D` over D in {0, 1}^(E x C), where P is the
relevance of E experts for C clients. Each expert is assigned to k_c clients, and each client gets
at least k_e and at most b experts. This optimisation is a bounded transportation problem. The
constraint matrix is totally unimodular and the bounds are integers, so every vertex of the linear
relaxation is integral. Therefore, the simplex method finds an exact optimum.
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
"""Tolerance of reduced costs when the largest score is 1. HiGHS accepts no smaller tolerance."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the number of clients per expert, and on the number of experts per client.

    The bounds apply separately to each module that has experts.
    """

    clients_per_expert: int
    """The exact number of clients per expert (k_c), at least 1."""
    least: int
    """The minimum number of experts per client (k_e), at least 0."""
    most: int
    """The maximum number of experts per client (b)."""

    def refuse(self, experts: int, clients: int) -> None:
        """Raise CoterieError if E experts cannot be assigned to C clients within the bounds.

        Every expert is assigned to k_c clients, where k_c is `clients_per_expert`. Every client
        gets at least k_e experts (`least`) and at most b experts (`most`). An assignment is
        possible if and only if `C k_e <= E k_c <= C min(b, E)` and `k_c <= C`.

        Args:
            experts: The number E of experts.
            clients: The number C of clients.

        Raises:
            CoterieError: If no assignment satisfies the bounds.
        """
        E, C, k_c = experts, clients, self.clients_per_expert
        if k_c > C:
            raise CoterieError(
                f"Each expert needs {k_c} clients, but the run has only {C}; lower "
                f"clients_per_expert (k_c) to at most {C}."
            )
        if C * self.least > E * k_c:
            raise CoterieError(
                f"There are too few experts: {C} clients need {C * self.least} assignments, at "
                f"least {self.least} for each client, but {E} experts provide only {E * k_c}, "
                f"{k_c} for each expert. Lower min_experts to at most {E * k_c // C}, or raise "
                "clients_per_expert or experts."
            )
        if E * k_c > C * self.most:  # never for b >= E, as k_c <= C here
            raise CoterieError(
                f"There are too many experts: {E} experts need {E * k_c} assignments, {k_c} for "
                f"each expert, but {C} clients provide only {C * self.most}, at most {self.most} "
                f"for each client. Raise max_experts to at least {-(-E * k_c // C)}, or lower "
                "clients_per_expert or experts."
            )

    def relaxed(self, experts: int, clients: int) -> "Bounds":
        """Return the nearest feasible bounds for E experts and C clients.

        The number C changes when clients join or leave. If `clients_per_expert` (k_c) exceeds C, it
        is first set to C. Then, if `most` is less than ceil(E k_c / C), it is set to this value. If
        `least` is greater than floor(E k_c / C), it is set to this value. Feasible bounds are
        returned unchanged.

        Args:
            experts: The number E of experts.
            clients: The number C of clients.
        """
        k_c = min(self.clients_per_expert, clients)
        share = experts * k_c
        return Bounds(k_c, min(self.least, share // clients), max(self.most, -(-share // clients)))

    def homogeneous(self, experts: int, clients: int) -> "Bounds":
        """Return bounds that distribute the experts as evenly as possible among the clients.

        The number of clients per expert is not changed. Any two clients get equal numbers of
        experts, or numbers that differ by 1. These bounds are used in the homogeneous ablation of
        FedAMoLE's paper. The bounds are feasible unless `clients_per_expert` exceeds the number of
        clients.
        """
        share = experts * self.clients_per_expert
        return replace(self, least=share // clients, most=-(-share // clients))


def relevance(expert_embeddings: np.ndarray, token_embeddings: np.ndarray, dim: int) -> np.ndarray:
    """Compute the relevance of each expert for each client (FedAMoLE, equation 20).

    The relevance of expert j is the softmax of the scores `e_j . t_c / sqrt(dim)` over all clients
    c.

    Args:
        expert_embeddings: Each expert's embedding e, averaged over tokens, (experts, r), where r is
            the embedding width.
        token_embeddings: Each client's token embedding t, averaged over tokens, (clients, r).
        dim: The number `dim` in the formula of the scores. It is either the layer's input width, as
            in FedAMoLE's paper, or the embedding width r.

    Returns:
        The relevance P, (experts, clients), float64. Each row sums to 1.
    """
    experts, tokens = (np.asarray(e, np.float64) for e in (expert_embeddings, token_embeddings))
    return softmax(experts @ tokens.T / math.sqrt(dim), axis=1)


def relevance_of_known(
    experts: Sequence[Tensor | None], clients: Sequence[Tensor | None], dim: int
) -> np.ndarray:
    """Compute the relevance of each expert for each client when some embeddings are unknown.

    An expert with an unknown embedding is equally relevant for all clients. A client with an
    unknown embedding gets the mean embedding of the other clients.

    Args:
        experts: The mean embedding of each expert, (r,), or None if the embedding is unknown.
        clients: The mean embedding of each client's tokens, (r,), or None if the embedding is
            unknown. At least one client's embedding must be known.
        dim: The number `dim` in the formula of the function `relevance`.

    Returns:
        The relevance, (experts, clients), float64.
    """
    known = torch.stack([tokens for tokens in clients if tokens is not None])
    mean, zeros = known.mean(0), torch.zeros_like(known[0])
    embeddings = torch.stack([zeros if e is None else e for e in experts])
    tokens = torch.stack([mean if t is None else t for t in clients])
    return relevance(embeddings.numpy(), tokens.numpy(), dim)


def assign(scores: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Assign the experts of one module to clients, such that the sum of scores is maximal.

    The sum is over all pairs of a client and an expert that is assigned to this client. The result
    is deterministic and does not depend on the number of threads, because the solver breaks ties in
    a fixed order.

    Args:
        scores: The relevance of experts for clients, (experts, clients). The scores must be finite,
            but may have any scale.
        bounds: The bounds of the assignment.

    Returns:
        The assignment, (experts, clients), bool.

    Raises:
        CoterieError: If the bounds are infeasible.
    """
    E, C = scores.shape
    bounds.refuse(E, C)
    # The solver's tolerance is absolute, so scores are shifted and scaled. The number of clients
    # per expert is fixed, so this changes no optimum.
    gains = np.asarray(scores, np.float64) - scores.min(axis=1, keepdims=True)
    gains /= gains.max() or 1.0
    # The variables are D, row by row, and one slack per client: b minus its number of experts. Two
    # inequalities per client instead of the slack would add rows and about double the time.
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
    return _as_integral(result.x[: E * C].reshape(E, C), bounds)


def assign_all(scores: Mapping[str, np.ndarray], bounds: Bounds) -> dict[str, np.ndarray]:
    """Call `assign` for each module, in order to assign the module's experts to clients.

    The modules' assignments are computed in parallel, in as many threads as PyTorch uses (HiGHS
    releases the GIL). Each assignment is computed by one thread, so the results do not depend on
    the number of threads.

    Args:
        scores: A mapping from the name of each module to its scores; see `assign`.
        bounds: The bounds of every assignment.

    Returns:
        A mapping from the name of each module to the assignment.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        assignments = pool.map(lambda matrix: assign(matrix, bounds), scores.values())
        return dict(zip(scores, assignments, strict=True))


def _as_integral(solution: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Convert the solver's solution, (experts, clients), to bool.

    Raises:
        RuntimeError: If the solution is not integral or violates the bounds.
    """
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
