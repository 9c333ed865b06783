"""Batches that requests join and leave give the tokens of `generate` for each request alone."""

import random
import threading
import time
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, small_model

from coterie.evaluation.generation import Sampling
from coterie.inference.streaming import StreamedText
from coterie.methods.pretrained import bare
from coterie.serve import scheduler as module
from coterie.serve.batches import can_join
from coterie.serve.models import Models, ServedModel
from coterie.serve.scheduler import Failure, Piece, Request, Scheduler

NEVER = 10**9


class Asked:
    """A request, and what was delivered."""

    def __init__(self, model: ServedModel, prompt: list[int], sampling: Sampling, **more: Any):
        ends, stops = more.pop("ends", (NEVER,)), more.pop("stops", ())
        text = StreamedText(model.weights.base.tokenizer, ends, stops, strip=False)
        self.pieces: list[Piece] = []
        self.failure: Failure | None = None
        self.done, self.begun = threading.Event(), threading.Event()
        end = time.monotonic() + more.pop("seconds", 60)
        self.request = Request(model.weights, prompt, sampling, text, self.deliver, end, **more)

    def deliver(self, piece: Piece | Failure) -> None:
        if isinstance(piece, Failure):
            self.failure = piece
        else:
            self.pieces.append(piece)
        self.begun.set()
        if self.failure or self.pieces[-1].reason:
            self.done.set()

    @property
    def ids(self) -> list[int]:
        assert self.done.wait(60)
        assert self.failure is None, self.failure
        return [token.id for piece in self.pieces for token in piece.tokens]

    @property
    def text(self) -> str:
        assert self.done.wait(60)
        return "".join(piece.text for piece in self.pieces)


@pytest.fixture
def scheduler():
    errors: list[Exception] = []
    running = Scheduler(100, errors.append)
    running.start()
    yield running
    running.stop()
    assert not errors, errors


def submit(scheduler: Scheduler, *asked: Asked) -> tuple[Asked, ...]:
    """Submit requests, which are all accepted."""
    assert all(scheduler.submit(each.request) for each in asked)
    return asked


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed + length).choices(range(10, 900), k=length)


def alone(model: ServedModel, ids: list[int], count: int, end: int = NEVER) -> list[int]:
    """Return the tokens that `generate` appends to one prompt."""
    attached: Any = model.weights.attach()
    mask = torch.ones(1, len(ids), dtype=torch.long)
    output = attached.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=end if end != NEVER else None,
        pad_token_id=0,
    )
    return output[0].tolist()[len(ids) :]


NAMES = ["comigs-1g1s:anna", "comigs-1g1s:ben", "fedavg:anna", "base:ben", "fedprompt:poet"]


def test_answers_do_not_depend_on_other_requests(models: Models, scheduler: Scheduler) -> None:
    """Compare batched answers of five models with answers to single requests.

    Prompts have different lengths, some longer than a chunk. Answers begin and end at different
    times, by length or by an end token.
    """
    wanted: list[tuple[ServedModel, list[int], int, int]] = []
    for number in range(25):
        model = models.by_name[NAMES[number % len(NAMES)]]
        ids = prompt(1 + number * 37 % (30 if model.method == "fedprompt" else 150), number)
        count = 1 + number * 7 % 26
        tokens = alone(model, ids, count)
        end = tokens[count // 2] if number % 3 == 0 else NEVER
        wanted.append((model, ids, count, end))
    expected = [alone(*arguments) for arguments in wanted]
    asked: list[Asked] = []
    for model, ids, count, end in wanted:
        asked.append(Asked(model, ids, Sampling(count), ends=(end,)))
        assert scheduler.submit(asked[-1].request)
        if len(asked) % 4 == 0:
            asked[-2].begun.wait(60)  # the next requests join running ones
    assert [each.ids for each in asked] == expected
    assert len({tuple(tokens[:3]) for tokens in expected}) > 10, "the answers differ"


def test_long_prompts_are_read_in_chunks(models, scheduler, monkeypatch) -> None:
    model = models.by_name["comigs-1g1s:anna"]
    monkeypatch.setattr(module, "CHUNK", 16)
    asked = [Asked(model, prompt(length), Sampling(12)) for length in (5, 150, 17, 100, 16)]
    submit(scheduler, *asked)
    for each in asked:
        assert each.ids == alone(model, each.request.prompt, 12)


def test_sampled_answers_depend_on_the_seed_only(models, scheduler) -> None:
    model = models.by_name["comigs-1g1s:ben"]

    asked = [Asked(model, prompt(20), Sampling(15, 0.9, 0.8, seed)) for seed in (1, 5, 1, 7, 1)]
    single = submit(scheduler, asked[0])[0].ids
    together = submit(scheduler, *asked[1:])
    assert [asked.ids == single for asked in together] == [False, True, False, True]


def test_stops_are_withheld_and_not_part_of_the_text(models, scheduler) -> None:
    model = models.by_name["comigs-1g1s:anna"]
    [plain] = submit(scheduler, Asked(model, prompt(20), Sampling(40)))
    middle = len(plain.text) // 2
    stop = plain.text[middle : middle + 5]
    stopped = Asked(model, prompt(20), Sampling(40), stops=("never seen", stop))
    submit(scheduler, stopped)
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.pieces[-1].reason == "stop"


def test_logprobs_and_routing_are_those_of_the_model(models, scheduler) -> None:
    model = models.by_name["comigs-1g1s:anna"]
    others = [Asked(model, prompt(n), Sampling(30)) for n in (3, 60)]
    asked = Asked(model, prompt(20), Sampling(8), logprobs=3, roles=True)
    submit(scheduler, others[0], asked, others[1])
    ids = asked.request.prompt + asked.ids
    assert all(each.ids for each in others)
    with torch.no_grad():
        attached = model.weights.attach()
        logits = attached(torch.tensor([ids])).logits[0, 19:-1].log_softmax(-1)
        routers = [m for m in attached.modules() if getattr(m, "router", None) is not None]
        shares = torch.stack([m.token_routing() for m in routers]).mean(0)[19:-1]
    tokens = [token for piece in asked.pieces for token in piece.tokens]
    for token, row, share in zip(tokens, logits, shares, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [id for id, _ in token.top] == row.topk(3).indices.tolist()
        assert token.roles["generalist"] == pytest.approx(float(share[0]), abs=1e-4)
        assert sum(token.roles.values()) == pytest.approx(1, abs=1e-5)


def test_cancelled_and_late_requests_free_their_places(models) -> None:
    model, scheduler = models.by_name["comigs-1g1s:anna"], Scheduler(2, print)
    scheduler.start()
    try:
        first, second, third = (Asked(model, prompt(9), Sampling(10**6)) for _ in range(3))
        submit(scheduler, first, second)
        assert not scheduler.submit(third.request)
        assert first.begun.wait(60)
        first.request.cancelled = True
        late = Asked(model, prompt(9), Sampling(10**6), seconds=0.1)
        submit(scheduler, late)
        assert late.done.wait(60)
        assert late.failure == Failure(504, module.TIMED_OUT)
        delivered = len(first.pieces)
        assert second.begun.wait(60)
        assert len(first.pieces) == delivered
    finally:
        scheduler.stop()
    assert scheduler.submit(third.request)
    assert second.failure == third.failure == Failure(503, module.STOPPED)


def test_an_error_ends_only_the_requests_of_its_model(models) -> None:
    errors: list[Exception] = []
    scheduler = Scheduler(9, errors.append)
    scheduler.start()
    broken, sound = models.by_name["comigs-1g1s:anna"], models.by_name["fedavg:anna"]

    asked = Asked(broken, prompt(9), Sampling(5))
    asked.request.row.ids.append(-1)  # no such token
    other = Asked(sound, prompt(9), Sampling(5))
    submit(scheduler, asked, other)
    assert len(other.ids) == 5
    assert asked.done.wait(60)
    scheduler.stop()
    assert (asked.failure, len(errors)) == (Failure(500, module.FAILED), 1)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_is_batched_or_read_again(name: str) -> None:
    """Check that all models with attention alone are batched; recurrent states cannot be padded."""
    recurrent = ("mamba", "mamba2", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1")
    assert can_join(small_model(name)) == (name not in recurrent)


def test_a_model_that_cannot_join_is_read_again(models, monkeypatch) -> None:
    monkeypatch.setattr(module, "can_join", lambda model: False)
    scheduler = Scheduler(9, print)
    scheduler.start()
    models_asked = [models.by_name[n] for n in ("comigs-1g1s:anna", "fedprompt:poet") * 2]
    asked = [Asked(m, prompt(5 + n), Sampling(9)) for n, m in enumerate(models_asked)]
    submit(scheduler, *asked)
    ids = [each.ids for each in asked]
    scheduler.stop()
    for model, each, tokens in zip(models_asked, asked, ids, strict=True):
        assert tokens == alone(model, each.request.prompt, 9)
    bare(models_asked[0].weights.base)
