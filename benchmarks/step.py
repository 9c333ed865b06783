"""The time of a local training step, compared with PEFT, a naive mixture and the published code.

A batch of 8 x 128 tokens (`--batch`): forward, backward and an AdamW step of everything but the
routers, as in an expert step of CoMiGS. The base is GPT-2 (124M, random weights, no dropout), or
with `--base smollm2` the built-in base smollm2-135m, which has no naive contestants. Contestants
take turns, so that other load on the machine affects all of them; ratios are of medians of one run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import gpt2, options_of, show, write
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters import Adapter, Layout, of_roles
from coterie.adapters.fused import storing_activations
from coterie.bases import BaseSpec, load_base
from coterie.bases.precision import Precision, autocast, prepare
from coterie.losses.tokens import language_model_loss

TIME = 128
VOCABULARY = 49152  # SmolLM2's; GPT-2's is larger
RANK, ALPHA = 8, 16.0
TARGETS = [  # contestant, against, largest ratio
    ("ours, 2 experts", "PEFT LoRA", 1.10),
    ("ours, 2 experts", "naive mixture", 0.75),
    ("ours, 2 experts", "gathering mixture", 0.62),
    ("ours, 4 experts, top 2", "PEFT LoRA", 1.35),
]


class NaiveLora(nn.Module):
    """A linear layer with a low-rank correction, as the formula reads."""

    def __init__(self, base: nn.Module, inside: int, outside: int) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(RANK, inside), a=5**0.5))
        self.B = nn.Parameter(torch.zeros(outside, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        return self.base(x) + ALPHA / RANK**0.5 * F.linear(F.linear(x, self.A), self.B)


class NaiveMixture(nn.Module):
    """One full MLP per expert, on all tokens or on those gathered for it (the released code)."""

    def __init__(self, mlp: nn.Module, experts: int, gathers: bool) -> None:
        super().__init__()
        up, down = mlp.c_fc, mlp.c_proj
        assert isinstance(up, nn.Module)
        assert isinstance(down, nn.Module)
        wide, dim = (int(size) for size in down.weight.shape)  # pyright: ignore
        self.up = nn.ModuleList(NaiveLora(up, dim, wide) for _ in range(experts))
        self.down = nn.ModuleList(NaiveLora(down, wide, dim) for _ in range(experts))
        self.act, self.gathers = mlp.act, gathers
        self.router = nn.Linear(dim, experts, bias=False).requires_grad_(False)

    def expert(self, i: int, x: Tensor) -> Tensor:
        """Apply one expert's MLP, (..., dim) to (..., dim)."""
        return self.down[i](self.act(self.up[i](x)))  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).topk(2)
        weights = weights.softmax(-1, dtype=torch.float).type_as(x)
        result = torch.zeros_like(tokens)
        for i in range(len(self.up)):
            if self.gathers:
                rows, slot = torch.where(chosen == i)
                result[rows] += weights[rows, slot, None] * self.expert(i, tokens[rows])
            else:
                weight = (weights * (chosen == i)).sum(-1, keepdim=True)
                result = result + weight * self.expert(i, tokens)
        return result.view_as(x)


def smollm2(precision: Precision) -> PreTrainedModel:
    """Load SmolLM2 with its pretrained weights, frozen."""
    weights = "fp32" if precision == "fp32" else None
    return load_base(BaseSpec(name="smollm2-135m", weights=weights), None, TIME).model


@dataclass(frozen=True)
class Subject:
    """A base to train adapters on."""

    title: str
    load: Callable[[Precision], PreTrainedModel]
    lora: dict[str, Any]
    """PEFT's options for LoRA on the layers of our adapter, with rank 8 on attention."""
    naive: bool = False
    """Whether there are naive mixtures for this base."""


BASES = {
    "gpt2": Subject(
        "GPT-2 124M",
        lambda _: gpt2(),
        {
            "target_modules": ["c_fc", "c_attn", "c_proj"],
            "rank_pattern": {r"attn\.c_(attn|proj)": RANK},
            "fan_in_fan_out": True,
        },
        naive=True,
    ),
    "smollm2": Subject(
        "SmolLM2-135M",
        smollm2,
        {
            "target_modules": r".*\.([qkvo]|gate|up|down)_proj",
            "rank_pattern": {"[qkvo]_proj": RANK},
        },
    ),
}


@dataclass
class Contestant:
    """A model, its loss on ids: (batch, time + 1), and what is trained."""

    loss: Callable[[Tensor], Tensor]
    trained: list[nn.Parameter]
    stores: bool = False
    """Whether our mixture stores activations, as with `training.store_activations`."""


def hf_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss


def bare(model: PreTrainedModel) -> Contestant:
    def loss(ids: Tensor) -> Tensor:
        embedded = model.get_input_embeddings()(ids[:, :-1]).requires_grad_()
        return model(inputs_embeds=embedded, labels=ids[:, :-1], use_cache=False).loss

    return Contestant(loss, [])


def peft(base: PreTrainedModel, options: dict[str, Any], experts: int) -> Contestant:
    config = LoraConfig(r=experts * RANK, lora_alpha=int(ALPHA), **options)
    model = get_peft_model(base, config)
    return Contestant(hf_loss(model), [p for p in model.parameters() if p.requires_grad])


def naive(experts: int, gathers: bool) -> Contestant:
    model = gpt2()
    for block in model.transformer.h:
        attention = block.attn
        attention.c_attn = NaiveLora(attention.c_attn, 768, 3 * 768)  # pyright: ignore
        attention.c_proj = NaiveLora(attention.c_proj, 768, 768)  # pyright: ignore
        block.mlp = NaiveMixture(block.mlp, experts, gathers)  # pyright: ignore
    return Contestant(hf_loss(model), [p for p in model.parameters() if p.requires_grad])


def ours(
    model: PreTrainedModel, specialists: int, precision: Precision, plain: bool = False
) -> Contestant:
    """Return Coterie's contestant; `plain`: with the loss, casts and attention of the others."""
    if not plain:
        prepare(model, precision, TIME)
    layout = Layout(1, specialists, rank=RANK, attention_rank=RANK, alpha=ALPHA)
    adapter = Adapter(model, layout, seed=0, client="ada", common=lambda _: False)
    adapter.attach(model)
    roles = ("dense", "generalist", "specialist")
    adapter.require_grad(of_roles(*roles))
    loss = hf_loss(model) if plain else lambda ids: language_model_loss(model, ids)
    return Contestant(loss, list(adapter.tensors(of_roles(*roles)).values()))


def contestants(base: Subject, precision: Precision) -> dict[str, Contestant]:
    load = partial(base.load, precision)
    runners = {"bare base": bare(load()), "PEFT LoRA": peft(load(), base.lora, 2)}
    if base.naive:
        runners["naive mixture"] = naive(2, gathers=False)
        runners["gathering mixture"] = naive(2, gathers=True)
    two = ours(load(), 1, precision)
    runners |= {
        "ours, 2 experts": two,
        "ours, 2 experts, activations stored": replace(two, stores=True),
        "ours, 4 experts, top 2": ours(load(), 3, precision),
        "our mixture alone, 2 experts": ours(load(), 1, precision, plain=True),
    }
    sizes = {name: sum(p.numel() for p in c.trained) for name, c in runners.items()}
    for name, size in sizes.items():
        if name not in ("bare base", "ours, 4 experts, top 2"):
            assert size == sizes["PEFT LoRA"], sizes
    return runners


def measure(
    runners: dict[str, Contestant],
    precision: Precision,
    batch: int,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, after one round of warm-up."""
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (batch, TIME + 1), generator=chance)

    def step(contestant: Contestant, optimiser: torch.optim.Optimizer | None) -> None:
        with autocast(precision, "cpu"), storing_activations(contestant.stores):
            loss = contestant.loss(ids)
        loss.backward()
        if optimiser is not None:
            optimiser.step()
            optimiser.zero_grad()

    adamw = partial(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    steps = {
        name: partial(step, contestant, adamw(contestant.trained) if contestant.trained else None)
        for name, contestant in runners.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, work in steps.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    return {name: values[1:] or values for name, values in seconds.items()}


def show_medians(title: str, batch: int, seconds: dict[str, float], precision: Precision) -> None:
    against = {
        "PEFT LoRA": "x PEFT",
        "naive mixture": "x naive",
        "gathering mixture": "x gathering",
    }
    against = {name: column for name, column in against.items() if name in seconds}
    setting = f"{precision}, CPU, {torch.get_num_threads()} threads"
    rows = []
    for name, median in seconds.items():
        ratios = [f"{median / seconds[other]:.2f}" for other in against]
        rows.append((name, f"{1000 * median:.0f}", *ratios))
    title = f"One training step, {title}, {batch} x {TIME} tokens, {setting}"
    show(title, ("contestant", "median ms", *against.values()), rows)
    for contestant, other, limit in TARGETS:
        if other in seconds:
            ratio = seconds[contestant] / seconds[other]
            verdict = "met" if ratio <= limit else "missed"
            print(f"{contestant}: {ratio:.2f} x {other}, target {limit:.2f}: {verdict}")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--base", choices=[*BASES], default="gpt2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="the process's own time on one thread: steadier on a machine that others use",
    )
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    torch.manual_seed(0)
    clock = time.process_time if options.cpu_time else time.perf_counter
    base, precision, batch = BASES[options.base], options.precision, options.batch
    runs = measure(contestants(base, precision), precision, batch, options.rounds, clock)
    medians = {name: statistics.median(values) for name, values in runs.items()}
    show_medians(base.title, batch, medians, precision)
    ratios = [
        {"contestant": contestant, "against": other, "target": limit,
         "ratio": medians[contestant] / medians[other]}
        for contestant, other, limit in TARGETS
        if other in medians
    ]  # fmt: skip
    write(options, threads=torch.get_num_threads(), seconds=medians, ratios=ratios)


if __name__ == "__main__":
    main()
