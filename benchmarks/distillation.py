"""How much memory and time one step of distillation takes, sparse as Coterie does it and dense.

A student of GPT-2's vocabulary with random weights, small so that logits dominate, under LoRA; the
teacher's 128 likeliest tokens at each of 4 x 512 positions; forward and backward, bf16 autocast.
Dense: all of the student's logits, the teacher's probabilities spread over the vocabulary, and
PyTorch's kl_div. Each has a fresh process; memory is its peak (Linux's ru_maxrss) over what the
process held before its first step, time the median of the steps after that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from common import MIB, fresh, options_of, peak, random_ids, show, take_turns, write
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from coterie.adapters import Adapter, Layout, of_roles
from coterie.bases.precision import autocast, prepare
from coterie.losses.tokens import Batch, soft_target_loss
from coterie.seeding import generator

BATCH, TIME, TOP = 4, 512, 128
VOCABULARY = 50_257
Loss = Callable[[PreTrainedModel, Tensor, Tensor, Tensor], Tensor]
"""From the model, ids (batch, time + 1), and the teacher's tokens and shares (tokens, k)."""


@dataclass(frozen=True)
class Row:
    """One way of doing it."""

    way: str
    bytes: int
    """The peak, over what was held before."""
    seconds: float
    loss: float
    """Kullback-Leibler divergence in nats per token, the same for all ways."""
    gradient: float
    """The norm of the adapter's, likewise."""


def sparse(model: PreTrainedModel, ids: Tensor, tokens: Tensor, shares: Tensor) -> Tensor:
    """The cross-entropy, less what of it is the teacher's own entropy."""
    own = (shares * shares.log()).sum(1).mean()
    return soft_target_loss(model, Batch(ids), tokens, shares) + own


def dense(model: PreTrainedModel, ids: Tensor, tokens: Tensor, shares: Tensor) -> Tensor:
    """All logits, and all of the teacher's probabilities."""
    batch, length = ids[:, 1:].shape
    teacher = torch.zeros(len(tokens), VOCABULARY).scatter_(1, tokens, shares)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    student = F.log_softmax(logits, -1)
    wanted = teacher.view(batch, length, VOCABULARY)
    return F.kl_div(student, wanted, reduction="sum") / len(tokens)


WAYS: dict[str, Loss] = {"sparse": sparse, "dense": dense}


def student() -> tuple[PreTrainedModel, Adapter]:
    """A frozen model with an adapter attached."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=VOCABULARY)
    model = GPT2LMHeadModel(config)
    prepare(model, "bf16", TIME)
    layout = Layout(generalists=1, specialists=0, routed=False)
    adapter = Adapter(model, layout, seed=0, client="student", common=lambda _: False)
    adapter.require_grad(of_roles("dense", "generalist"))
    adapter.attach(model)
    return model, adapter


def teacher() -> tuple[Tensor, Tensor]:
    """Tokens and shares, (tokens, k): different tokens in a row."""
    chance = generator(0, "teacher")
    firsts = torch.randint(VOCABULARY - TOP * 300, (BATCH * TIME, 1), generator=chance)
    tokens = firsts + 300 * torch.arange(TOP)
    return tokens, torch.randn(tokens.shape, generator=chance).softmax(-1)


def measure(way: str, steps: int, threads: int) -> Row:
    """To be called once per process, as a peak never falls."""
    torch.set_num_threads(threads)
    model, adapter = student()
    ids = random_ids(BATCH, TIME + 1, vocabulary=VOCABULARY)
    tokens, shares = teacher()
    parameters = list(adapter.tensors().values())
    before, found = peak(), {}

    def step() -> None:
        with autocast("bf16", "cpu"):
            found["loss"] = WAYS[way](model, ids, tokens, shares)
        found["gradients"] = torch.autograd.grad(found["loss"], parameters)

    seconds = median(take_turns({way: step}, steps)[way])
    norm = torch.stack([gradient.norm() for gradient in found["gradients"]]).norm()
    return Row(way, peak() - before, seconds, found["loss"].item(), norm.item())


def cells(row: Row, last: Row) -> list[str]:
    return [
        row.way,
        f"{row.bytes / MIB:,.0f}",
        f"{row.bytes / last.bytes:.2f}",
        f"{row.seconds:.2f}",
        f"{row.seconds / last.seconds:.2f}",
        f"{row.loss:.4f}",
        f"{row.gradient:.5f}",
    ]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, after one")
    options = parser.parse_args()
    rows = [fresh(measure, way, options.steps, options.threads) for way in WAYS]
    show(
        f"One step of distillation, {BATCH} x {TIME} tokens, top {TOP} of {VOCABULARY:,}, bf16, "
        f"{options.threads} threads",
        ("way", "peak MiB", "of dense", "seconds", "of dense", "KL", "gradient"),
        [cells(row, rows[-1]) for row in rows],
        "Peak: over what the process held before, which is the model and the teacher's top tokens.",
    )
    write(options, rows=rows)


if __name__ == "__main__":
    main()
