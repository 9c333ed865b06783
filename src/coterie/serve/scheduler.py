"""The scheduler: a thread that decodes the requests to a model as a batch, and models in turn."""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.adapters import Trainable, attached, detach
from coterie.errors import ran_out_of_memory
from coterie.evaluation.gate import Gate
from coterie.evaluation.generation import Sampling
from coterie.inference.streaming import StreamedText
from coterie.serve.batches import CHUNK, Batch, Forward, Row, Scored, can_join
from coterie.serve.models import Weights
from coterie.serve.sampling import choose

STEPS = 8
"""The number of tokens after which another model has its turn."""
ROWS = 16
"""The maximum number of requests in a batch; further requests wait."""
TIMED_OUT = "The request took longer than the server allows; ask for a shorter answer."
STOPPED = "The server is shutting down."
FAILED = "The model failed; the server's log names the error."
NO_MEMORY = "The server has too little memory for the request; shorten it."


@dataclass(frozen=True)
class Token:
    """A generated token.

    Attributes:
        id: The token's id.
        logprob: Its log-probability at temperature 1; NaN unless log-probabilities are requested.
        top: The ids and log-probabilities of the most probable tokens, if requested.
        roles: The routing weight of each role of experts at the position that predicts the token,
            if requested.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    roles: dict[str, float]


@dataclass(frozen=True)
class Piece:
    """New text of an answer.

    Attributes:
        text: The text, which can be empty.
        tokens: The tokens generated since the previous piece.
        reason: Why the answer ends: "stop" or "length"; None if it continues.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Failure:
    """The reason why a request cannot be answered, with the HTTP status of the reply."""

    status: int
    message: str


@dataclass(eq=False)
class Request:
    """A request to continue a prompt.

    Attributes:
        weights: The model.
        prompt: The token ids of the prompt.
        sampling: The settings of the generation.
        text: The text of the answer.
        deliver: Function that is called in the scheduler's thread with each piece of the answer,
            or with the reason for a failure, which is the last call.
        deadline: The time on the monotonic clock at which the request fails.
        logprobs: The number of the most probable tokens that are reported with each token; None
            if no log-probabilities are requested.
        roles: Whether the weights of the roles of experts are requested.
        fallback: A gate that has not yet seen the prompt, and the model that answers if the gate
            does not accept it; None if there is no such gate.
    """

    weights: Weights
    prompt: list[int]
    sampling: Sampling
    text: StreamedText
    deliver: Callable[[Piece | Failure], None]
    deadline: float
    logprobs: int | None = None
    roles: bool = False
    fallback: tuple[Gate, Weights] | None = None
    cancelled: bool = False
    """Whether the client has disconnected. Any thread may set this to True."""
    ended: bool = field(default=False, init=False)
    row: Row = field(init=False)
    chance: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Begin the sequence with the prompt."""
        self.row = Row(list(self.prompt))
        self.chance = torch.Generator().manual_seed(self.sampling.seed)

    @torch.no_grad()
    def take(self, logits: Tensor, roles: dict[str, float]) -> None:
        """Choose the next token, and deliver the new text.

        Args:
            logits: The scores of all tokens, shaped (vocabulary,).
            roles: The weights of the roles of experts at the last token.
        """
        id = choose(logits, self.sampling, self.chance)
        logprob, top = float("nan"), ()
        if self.logprobs is not None:
            logprobs = logits.log_softmax(0)
            best = logprobs.topk(self.logprobs)
            logprob = float(logprobs[id])
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        self.row.ids.append(id)
        text = self.text.add([id])
        reason = "stop" if id in self.text.ends or self.text.stopped else None
        if reason is None and len(self.row.ids) == len(self.prompt) + self.sampling.tokens:
            reason = "length"
        self.ended = reason is not None
        text += self.text.finish() if self.ended else ""
        self.deliver(Piece(text, (Token(id, logprob, top, roles),), reason))

    def fail(self, status: int, message: str) -> None:
        """End the request with an error."""
        self.ended = True
        self.deliver(Failure(status, message))

    def is_active(self, now: float) -> bool:
        """Return whether the request needs tokens; fail it if its deadline has passed."""
        if not self.ended and not self.cancelled and now >= self.deadline:
            self.fail(504, TIMED_OUT)
        return not self.ended and not self.cancelled


class Group:
    """The requests to one model: those that are decoded, and those whose prompts are unread."""

    def __init__(self) -> None:
        self.batch = Batch()
        self.running: dict[Row, Request] = {}
        self.waiting: deque[Request] = deque()

    @property
    def requests(self) -> list[Request]:
        """All requests of the group."""
        return [*self.running.values(), *self.waiting]

    def clear(self, now: float) -> None:
        """Remove requests that have ended, are cancelled, or have passed their deadline."""
        self.waiting = deque(r for r in self.waiting if r.is_active(now))
        self.running = {row: r for row, r in self.running.items() if r.is_active(now)}
        self.batch.keep(self.running.__contains__)

    def advance(self, forward: Forward) -> None:
        """Generate the next token of each running request, and read prompts of waiting requests."""
        if self.running:
            requests = list(self.running.values())
            roles = any(request.roles for request in requests)
            self._take(requests, self.batch.step(forward, roles))
            self.clear(time.monotonic())
        budget = CHUNK
        while budget > 0 and self.waiting and len(self.running) < ROWS:
            request = self.waiting[0]
            before = request.row.read
            scored = forward.read(request.row, budget, request.roles)
            budget -= request.row.read - before if forward.cached else CHUNK
            if scored is None:
                continue
            self._take([request], scored)
            if forward.cached and not request.ended:
                self.batch.join(request.row)
                self.running[request.row] = request
            if forward.cached or request.ended:
                self.waiting.popleft()

    def _take(self, requests: Sequence[Request], scored: Scored) -> None:
        for number, request in enumerate(requests):
            roles = {role: float(w[number]) for role, w in scored.roles.items() if request.roles}
            request.take(scored.logits[number], roles)


class Scheduler:
    """A queue of requests, and the thread that answers them.

    Args:
        most: The maximum number of requests that are running or waiting.
        report: Function that is called with each unexpected error.
    """

    def __init__(self, most: int, report: Callable[[Exception], None]) -> None:
        self._most, self._report = most, report
        self._changed = threading.Condition()
        """A lock for the attributes up to `_stopped`; all others belong to the thread."""
        self._requests: list[Request] = []
        self._new: list[Request] = []
        self._stopped = False
        self._groups: dict[Weights, Group] = {}
        self._can_join: dict[int, bool] = {}
        self._attached: dict[int, tuple[Weights, Forward, Trainable | None]] = {}
        """The model that was last used of each base, with its adapter, by the `id` of the base."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current token, and end all requests with an error."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        for request in self._requests:
            if not request.ended:
                request.fail(503, STOPPED)

    def submit(self, request: Request) -> bool:
        """Add a request to the queue; return False if the queue is full.

        If the scheduler has been stopped, the request fails at once.
        """
        with self._changed:
            self._requests = [r for r in self._requests if not (r.ended or r.cancelled)]
            if self._stopped:
                request.fail(503, STOPPED)
                return True
            if len(self._requests) >= self._most:
                return False
            self._requests.append(request)
            self._new.append(request)
            self._changed.notify()
            return True

    def _run(self) -> None:
        # Choosing PyTorch's own kernels for single rows warns about GPUs.
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        while self._admit():
            weights = next(iter(self._groups))
            try:
                self._turn(weights)
            except Exception as error:
                self._fail(weights, error)
            group = self._groups.pop(weights)
            if group.requests:  # its next turn comes after those of the other models
                self._groups[weights] = group

    def _admit(self) -> bool:
        """Move new requests to their groups, and wait if there are no requests.

        Returns:
            False if the scheduler has been stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._groups or self._stopped)
            for request in self._new:
                self._groups.setdefault(request.weights, Group()).waiting.append(request)
            self._new.clear()
            return not self._stopped

    def _turn(self, weights: Weights) -> None:
        """Let a model generate a few tokens."""
        group, forward = self._groups[weights], self._forward(weights)
        for _ in range(STEPS):
            group.clear(time.monotonic())
            self._redirect(weights)
            if not group.requests or not self._admit():
                return
            with torch.inference_mode():
                group.advance(forward)

    def _redirect(self, weights: Weights) -> None:
        """Move the waiting requests that their gates do not accept to other models."""
        waiting = self._groups[weights].waiting
        for request in list(waiting):
            fallback, request.fallback = request.fallback, None
            if fallback is None:
                continue
            gate, other = fallback
            if not gate.accepts(weights.base, [torch.tensor(request.prompt)])[0]:
                waiting.remove(request)
                self._groups.setdefault(other, Group()).waiting.append(request)

    def _fail(self, weights: Weights, error: Exception) -> None:
        """End all requests to a model after an unexpected error."""
        no_memory = ran_out_of_memory(error)
        if not no_memory:
            self._report(error)
        for request in self._groups[weights].requests:
            if not request.ended:
                request.fail(*((503, NO_MEMORY) if no_memory else (500, FAILED)))
        self._groups[weights] = Group()

    def _forward(self, weights: Weights) -> Forward:
        base = weights.base
        last = self._attached.get(id(base))
        # Other code in this process may have attached another adapter in the meantime.
        if last is not None and last[0] is weights and last[2] is attached(base.model):
            return last[1]
        if id(base) not in self._can_join:
            detach(base.model)
            self._can_join[id(base)] = can_join(base.model)
        forward = Forward(weights.attach(), self._can_join[id(base)])
        self._attached[id(base)] = weights, forward, attached(base.model)
        return forward
