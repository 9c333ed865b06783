"""How much of what models read is padding, and what that costs, with FedAMoLE's adapter.

On the ten tasks of papers/recipes/small/instructions.yaml, whose texts are needed (give the parent
of their folder `instructions` as --data), or on the conversations of the demo four-assistants.
Four ways to make a step's batch of samples of unlike lengths:

- padded: as drawn, all padded to the longest;
- groups (ours): the same samples, read in groups of similar lengths; same loss and gradient;
- sorted draws: the samples of 50 batches, sorted, so that a batch holds similar ones;
- packed: the same samples in a single row, none of which attends to another.

Tokens are counted where the base reads them. Time is of forward and backward of the same number of
steps of every client, in the process's own time on one thread; ways take turns, step by step.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import gpt2, options_of, show, write

from coterie.adapters import AmoleAdapter, AmoleLayout
from coterie.bases import Base, load_base
from coterie.bases.precision import Precision, autocast, prepare
from coterie.bases.sites import chosen_linears, decoder_of
from coterie.config.read import load_config
from coterie.data.examples import Examples, with_choices
from coterie.evaluation.answers import answer_losses
from coterie.evaluation.generation import generate_answers
from coterie.federation.participants import gathered
from coterie.losses.tokens import PIECE_COST, Batch, language_model_loss
from coterie.seeding import generator

RECIPE = Path(__file__).parent.parent / "papers/recipes/small/instructions.yaml"
CHATS = "four-assistants"
MEGA = 50
"""Batches that are sorted together."""
NEVER = 10**9
"""A price at which no batch is read in groups."""
HELD = range(6)
"""Domain experts that a client holds in the mean: each of 30 chooses 2 of 10 clients."""
LARGEST = 0.10
SAME: dict[Precision, float] = {"fp32": 1e-4, "bf16": 0.1}
"""How far a packed batch's loss may be from the padded one's; with a mask of its own, attention in
bf16 rounds more on a CPU."""
WAYS = ("padded", "groups", "sorted draws", "packed")


@dataclass
class Count:
    """Tokens of samples, tokens that the base read for them, passes, and seconds."""

    real: int = 0
    read: int = 0
    passes: int = 0
    seconds: float = 0.0

    @property
    def padding(self) -> float:
        """The share of what was read that is padding."""
        return 1 - self.real / self.read


@contextmanager
def counted(base: Base, count: Count, real: int, price: int | None = None) -> Iterator[None]:
    """Add what the base reads inside to a count, and how long it takes."""

    def add(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        count.read += inputs[0].numel()
        count.passes += 1

    count.real += real
    hook = base.model.get_input_embeddings().register_forward_pre_hook(add)
    start = time.process_time()
    try:
        with patch.dict(PIECE_COST, {} if price is None else {"cpu": price}):
            yield
    finally:
        count.seconds += time.process_time() - start
        hook.remove()


def batches(samples: Examples, way: str, size: int, steps: int, name: str) -> list[Batch]:
    """What a client's steps learn from."""
    draws = [
        torch.randint(len(samples), (size,), generator=generator(0, "batch", name, step))
        for step in range(steps)
    ]
    if way != "sorted draws":
        return [samples.batch(draw) for draw in draws]
    lengths, found = samples.starts.diff(), []
    for first in range(0, steps, MEGA):
        together = torch.cat(draws[first : first + MEGA])
        order = together[lengths[together].argsort(stable=True)]
        found += [samples.batch(draw) for draw in order.split(size)]
    return found


@contextmanager
def packed(base: Base, batch: Batch) -> Iterator[Batch]:
    """The samples one after another in a single row; inside, a base reads each as if alone."""
    assert batch.counted is not None
    assert batch.real is not None
    rows, places = torch.nn.functional.pad(batch.real, (1, 0), value=True).nonzero(as_tuple=True)
    counted = torch.nn.functional.pad(batch.counted, (1, 0))[rows, places]
    owner, place = rows[None, :-1], places[None, :-1]
    before = torch.ones(owner.shape[1], owner.shape[1], dtype=torch.bool).tril()
    own = (owner[:, :, None] == owner[:, None, :]) & before

    def alone(_: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        return inputs, {**options, "position_ids": place, "attention_mask": own[:, None]}

    hook = decoder_of(base.model).register_forward_pre_hook(alone, with_kwargs=True)
    try:
        yield Batch(batch.ids[rows, places][None], counted[None, 1:], owner >= 0)
    finally:
        hook.remove()


def adapted(base: Base) -> AmoleAdapter:
    """FedAMoLE's adapter of a client, attached, all of it trained."""
    layout = AmoleLayout(experts=len(HELD))
    held = dict.fromkeys(chosen_linears(base.model, layout.targets), HELD)
    adapter = AmoleAdapter(base.model, layout, 0, held)
    adapter.attach(base.model)
    return adapter


def train(base: Base, splits: dict[str, Examples], size: int, steps: int) -> dict[str, Count]:
    """Forward and backward passes of each way."""
    adapter, counts = adapted(base), {way: Count() for way in WAYS}
    for name, samples in splits.items():
        drawn = {way: batches(samples, way, size, steps, name) for way in WAYS}
        for step in range(-1, steps):  # the first warms up
            losses: dict[str, float] = {}
            for way, count in counts.items():
                batch, price = drawn[way][max(step, 0)], None if way == "groups" else NEVER
                real = int(batch.real.sum()) if batch.real is not None else batch.ids.numel()
                with ExitStack() as stack:
                    stack.enter_context(counted(base, count if step >= 0 else Count(), real, price))
                    if way == "packed":
                        batch = stack.enter_context(packed(base, batch))
                    with autocast(base.precision, "cpu"):
                        loss = language_model_loss(base.model, *batch)
                        losses[way] = loss.item()
                        loss = loss + 1e-3 * adapter.load_balance()
                    loss.backward()
            for way in ("groups", "packed"):
                assert abs(losses[way] / losses["padded"] - 1) < SAME[base.precision], losses
    return counts


def score(base: Base, splits: dict[str, Examples], window: int, size: int) -> dict[str, Count]:
    """What evaluation reads, as it was drawn and as it is read: losses, and prompts to go on."""
    counts = {"losses, in order": Count(), "losses": Count(), "prompts": Count()}
    for samples in splits.values():
        rows, _ = with_choices(base, samples, window)
        real = int((rows.starts.diff() - 1).sum())
        for chosen in torch.arange(len(rows)).split(size):
            counts["losses, in order"].real += int((rows.starts.diff() - 1)[chosen].sum())
            counts["losses, in order"].read += rows.batch(chosen).ids[:, 1:].numel()
        with counted(base, counts["losses"], real):
            answer_losses(base, base.model, rows, size)
        with counted(base, counts["prompts"], int((samples.answers - samples.starts[:-1]).sum())):
            generate_answers(base, base.model, samples, 1, size)
    return counts


def show_counts(title: str, counts: dict[str, Count], first: Count | None = None) -> None:
    rows = []
    for name, count in counts.items():
        row = [name, f"{count.padding:.1%}", f"{count.passes:,}" if count.passes else ""]
        if first:
            speed = count.real / count.seconds
            row += [f"{speed:,.0f}", f"{speed * first.seconds / first.real:.2f}"]
        rows.append(row)
    show(title, ["", "padding", "passes", *(["tokens/s", "x padded"] if first else [])], rows)


def main() -> None:
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--data", type=Path, help="folder that holds instructions/")
    parser.add_argument("--chats", action="store_true", help="conversations, not the ten tasks")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of each client")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--gpt2", action="store_true", help="GPT-2's size, not the embedded base")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if (options.data is None) != options.chats:
        parser.error("give either --data or --chats")
    changes = [f"data.window={options.window}", "data.limits.test=50"]
    changes += [] if options.chats else [f"data_root={options.data}"]
    config = load_config(Path(CHATS) if options.chats else RECIPE, changes)
    base = load_base(config.base, options.precision, options.window)
    if options.gpt2:
        model = gpt2()
        prepare(model, options.precision, options.window)
        base = Base(model, base.tokenizer, options.precision, base.device)
    clients = {one.name: one.data for one in gathered(config, base.tokenizer).clients}

    def of(split: Callable[..., object]) -> dict[str, Examples]:
        found = {name: split(data) for name, data in clients.items()}
        return {name: one for name, one in found.items() if isinstance(one, Examples)}

    trained = train(base, of(lambda data: data.train), options.batch, options.steps)
    on = "conversations" if options.chats else "ten tasks"
    what = f"{options.batch} samples, window {options.window}, {options.precision}"
    show_counts(f"Training on {on}, {what}", trained, trained["padded"])
    scored = score(base, of(lambda data: data.test), options.window, config.evaluation.batch)
    show_counts("Evaluation", scored)
    verdict = "met" if trained["groups"].padding < LARGEST else "missed"
    print(f"padding in training: target {LARGEST:.0%}: {verdict}")
    write(options, counts=trained | scored)


if __name__ == "__main__":
    main()
