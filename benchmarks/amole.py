"""FedAMoLE's layers: how long a training step takes, and what a client sends and gets.

Time: GPT-2 (124M, random weights, no dropout), batches of 8 x 128 tokens and, as in the paper, of
one sample (here 128 tokens), forward and backward,
with a shared and 8 domain experts (top 2) on attention's fused input layer; against PEFT's LoRA of
the same rank on the same layers, and against experts that each gather their tokens in a loop. All
have the same base and loss, and take turns; ratios are of the shortest times.

Traffic: the shape of Llama-3.2-1B, query and value layers, rank 8 in float32, 10 clients of which
each expert chooses 2, so that a client holds a fifth of the experts in the mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from common import MIB, gpt2, llama, options_of, show, take_turns, write
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from coterie.adapters import AmoleAdapter, AmoleLayout
from coterie.bases.precision import Precision, autocast, prepare
from coterie.bases.sites import chosen_linears
from coterie.losses.tokens import language_model_loss

BATCHES, TIME = (8, 1), 128
EXPERTS, TOP_K, RANK, ALPHA = 8, 2, 8, 16.0
BETA = 1e-3
CLIENTS, CHOSEN = 10, 2
LIMITS = {"PEFT LoRA": 1.6, "loop over experts": 0.6}
"""Largest ratio of our time to each of these."""


class LoopAmole(nn.Module):
    """The layer as research code implements it, with a loop over the experts.

    Tokens are copied for each of their experts and sorted by expert, the LoRA pair of each expert
    runs on its tokens, and the results are sorted back.
    """

    def __init__(self, base: nn.Module, inside: int, outside: int) -> None:
        super().__init__()
        self.base = base
        down = [nn.Linear(inside, RANK, bias=False) for _ in range(EXPERTS + 1)]
        up = [nn.Linear(RANK, outside, bias=False) for _ in range(EXPERTS + 1)]
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.projection = nn.Linear(inside, RANK, bias=False)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, time, in) to (batch, time, out); the last expert is the shared one."""
        tokens, y = x.flatten(0, 1), self.base(x)
        embeddings = torch.stack([self.down[j](tokens) for j in range(EXPERTS)], dim=1)
        scores = (embeddings * self.projection(tokens).unsqueeze(1)).sum(-1).float() / RANK**0.5
        p = scores.softmax(-1)
        best, chosen = p.topk(TOP_K, dim=-1)
        best = (best / best.sum(-1, keepdim=True)).to(y.dtype)
        load = chosen.flatten().bincount(minlength=EXPERTS)
        self.balance = EXPERTS * (load / chosen.numel() * p.mean(0)).sum()
        order = chosen.flatten().argsort()
        parts = tokens.repeat_interleave(TOP_K, dim=0)[order].split(load.tolist())
        weights = best.flatten()[order].unsqueeze(1).split(load.tolist())
        outputs = [self.up[j](self.down[j](parts[j])) * weights[j] for j in range(EXPERTS)]
        added = torch.cat(outputs)[order.argsort()].unflatten(0, (-1, TOP_K)).sum(1)
        added = added + self.up[EXPERTS](self.down[EXPERTS](tokens))
        return y + ALPHA / RANK * added.view_as(y)


Loss = Callable[[Tensor], Tensor]


def prepared(precision: Precision) -> GPT2LMHeadModel:
    base = gpt2()
    prepare(base, precision, TIME)
    return base


def peft(precision: Precision) -> Loss:
    base = prepared(precision)
    options = LoraConfig(
        r=RANK, lora_alpha=int(ALPHA), target_modules=["c_attn"], fan_in_fan_out=True
    )
    get_peft_model(base, options)  # pyright: ignore
    return lambda ids: language_model_loss(base, ids)


def loop(precision: Precision) -> Loss:
    base = prepared(precision)
    layers: list[LoopAmole] = []
    for block in base.transformer.h:
        layers.append(LoopAmole(block.attn.c_attn, 768, 3 * 768))  # pyright: ignore
        block.attn.c_attn = layers[-1]  # pyright: ignore
    return lambda ids: (
        language_model_loss(base, ids) + BETA * torch.stack([m.balance for m in layers]).sum()
    )


def ours(precision: Precision) -> Loss:
    base = prepared(precision)
    layout = AmoleLayout(experts=EXPERTS, rank=RANK, alpha=ALPHA, top_k=TOP_K)
    held = dict.fromkeys(chosen_linears(base, layout.targets), range(EXPERTS))
    adapter = AmoleAdapter(base, layout, 0, held)
    adapter.attach(base)
    return lambda ids: language_model_loss(base, ids) + BETA * adapter.load_balance()


def measure(precision: Precision, batch: int, rounds: int) -> dict[str, float]:
    """The shortest seconds per step of each contestant, after one round to warm up."""
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(50257, (batch, TIME + 1), generator=chance)
    makers = {"PEFT LoRA": peft, "loop over experts": loop, "ours": ours}

    def step(loss: Loss) -> None:
        with autocast(precision, "cpu"):
            value = loss(ids)
        value.backward()

    steps = {name: partial(step, make(precision)) for name, make in makers.items()}
    return {name: min(values) for name, values in take_turns(steps, rounds).items()}


@dataclass(frozen=True)
class Traffic:
    """Of a client that holds the mean number of experts, per round and in bytes."""

    experts: int
    held: int
    upload: int
    """Values after training and, by module, the mean embeddings of experts and tokens."""
    download: int


def traffic(experts: int) -> Traffic:
    with torch.device("meta"):
        base = LlamaForCausalLM(llama("1b"))
    layout = AmoleLayout(experts=experts, rank=RANK)
    held, paths = experts * CHOSEN // CLIENTS, chosen_linears(base, layout.targets)
    parts = AmoleAdapter(base, layout, 0, dict.fromkeys(paths, range(held))).parameters()
    values = sum(part.tensor.nbytes for part in parts.values())
    embeddings = len(paths) * (held + 1) * RANK * 4
    return Traffic(experts, held, values + embeddings, values)


def show_steps(seconds: dict[str, float], what: str) -> None:
    rows = []
    for name, least in seconds.items():
        limit = f"{LIMITS[name]:.2f} x" if name in LIMITS else ""
        rows.append((name, f"{1000 * least:.0f}", f"{seconds['ours'] / least:.2f} x", limit))
    title = f"One step of {what}, CPU, {torch.get_num_threads()} threads"
    show(title, ("contestant", "ms", "ours is", "at most"), rows)


def cells(row: Traffic) -> list[str]:
    sizes = [f"{size / MIB:.3f}" for size in (row.upload, row.download)]
    return [str(row.experts), str(row.held), *sizes]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    seconds: dict[str, dict[str, float]] = {}
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    for precision in precisions:
        for batch in BATCHES:
            what = f"{batch} x {TIME} tokens, {precision}"
            seconds[what] = measure(precision, batch, options.rounds)
            show_steps(seconds[what], what)
    rows = [traffic(experts) for experts in (15, 20, 25, 30)]
    title = "Llama-3.2-1B, mean per client and round, MiB (2^20 bytes)"
    show(title, ("experts", "held", "upload", "download"), [cells(row) for row in rows])
    write(options, seconds=seconds, limits=LIMITS, traffic=rows)


if __name__ == "__main__":
    main()
