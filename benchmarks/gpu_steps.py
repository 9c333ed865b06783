"""Training steps of Coterie and of PEFT on one device: tokens per second and peak memory.

A step of CoMiGS-1G1S at rank 8, through Coterie's client-side object, is compared with a step of
PEFT's LoRA with as many trained values, both in bf16 autocast with AdamW. The two take turns, first
in eager mode and then compiled. `torch.compile` compiles Coterie's decoder and PEFT's whole model.

The peak of a contestant is the memory that it holds between its steps, plus the memory that a step
adds. The memory that the other contestant holds at the same time is not included.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import MIB, make_base, random_ids
from gpu_checks import FAILS, NOT_RUN, Check, failure
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from coterie.adapters import of_roles
from coterie.bases import Base, BaseSpec, load_base
from coterie.bases.sites import decoder_of
from coterie.bases.weights import format_of
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import Participant, client_context
from coterie.methods.adapter import AdapterClient
from coterie.turn import FIRST

RANK = 8
SPEED, PEAK = {"1b": 1.0, "8b": 0.95}, 1.1
"""Minimum ratio to PEFT's tokens per second, by shape, and maximum ratio to PEFT's peak memory."""
COLUMNS = (
    *("base", "mode", "contestant", "tokens/s", "x PEFT", "target"),
    *("peak MiB", "x PEFT", "target", "note"),
)
CONTESTANTS, MODES = ("Coterie", "PEFT"), ("eager", "compiled")
ATTENTION = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Size:
    """The number of tokens in a step, the number of steps, and the compiler's backend."""

    batch: int
    window: int
    warm_up: int
    steps: int
    backend: str
    """The backend of torch.compile."""


FULL, SMALL = Size(4, 1024, 3, 10, "inductor"), Size(2, 32, 1, 2, "eager")


@dataclass(frozen=True)
class Row:
    """The measurements of one contestant, which are None if its steps failed."""

    shape: str
    weights: str
    mode: str
    contestant: str
    tokens_per_second: float | None = None
    peak: int | None = None
    """Peak memory in bytes; None on a CPU."""
    note: str = ""


class Contestant:
    """A training step on a device, and the memory in use between steps."""

    def __init__(self, make: Callable[[], "Steps"], device: torch.device) -> None:
        self.device = device
        before = self._allocated()
        self.steps = make()
        self.held = self._allocated() - before

    def measure(self) -> tuple[float, int]:
        """Take a step, and return its seconds and the peak memory in bytes."""
        before = self._allocated()
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        self.steps.step()
        if self._counts:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        highest = torch.cuda.max_memory_allocated(self.device) if self._counts else 0
        peak = self.held + highest - before
        self.held += self._allocated() - before
        return seconds, peak

    @property
    def _counts(self) -> bool:
        """Whether PyTorch counts the memory that is allocated on the device."""
        return self.device.type == "cuda"

    def _allocated(self) -> int:
        if not self._counts:
            return 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)


@dataclass(frozen=True)
class Steps:
    """A training step, the module that can be compiled, and the number of trained LoRA values."""

    step: Callable[[], object]
    compilable: nn.Module
    values: int


def client_side(base: Base, batch: int, window: int) -> AdapterClient:
    """Return a client of CoMiGS-1G1S on random tokens, whose rounds are one step each."""
    config = parse(
        {
            "clients": [{"name": "ada", "path": "nowhere"}],
            "method": {
                "name": "comigs-1g1s",
                "mlp": {"rank": RANK},
                "attention": {"rank": RANK},
                "router": {"every": 1000},
            },
            "data": {"window": window},
            "training": {"steps": 1, "batch": batch, "precision": "bf16"},
        }
    )
    embeddings: Any = base.model.get_input_embeddings()
    text = Tokens(random_ids(2**14, vocabulary=embeddings.num_embeddings).int(), 2**16)
    participant = Participant("ada", ClientData(text, text, text), {})
    side = config.method.client(client_context(config, base, participant, lambda *_: None))
    assert isinstance(side, AdapterClient)
    return side


def lora_training(plain: Any, loss: Callable[[Any], Tensor]) -> tuple[Any, int, Callable[[], None]]:
    """Create a PEFT model with as many LoRA values as CoMiGS-1G1S has at rank 8.

    Returns:
        The model, the number of LoRA values, and a function that takes a step of AdamW.
    """
    mlp = "gate_proj|up_proj|down_proj"
    how = LoraConfig(r=RANK, target_modules="all-linear", rank_pattern={mlp: 2 * RANK})
    model = get_peft_model(plain, how)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-3)

    def step() -> None:
        loss(model).backward()
        optimiser.step()
        optimiser.zero_grad()

    return model, sum(parameter.numel() for parameter in trained), step


def ours(folder: Path, weights: str, size: Size, device: torch.device) -> Steps:
    """Create the steps of Coterie's local training."""
    base = load_base(_spec(folder, weights), "bf16", size.window, device=str(device))
    side = client_side(base, size.batch, size.window)
    lora = side.adapter.tensors(of_roles("dense", "generalist", "specialist"))
    values = sum(parameter.numel() for parameter in lora.values())
    return Steps(lambda: side.train(FIRST), decoder_of(base.model), values)


def peft(folder: Path, weights: str, size: Size, device: torch.device) -> Steps:
    """Create the steps of PEFT's LoRA, with a model and an optimiser as in its documentation."""
    how = format_of(_spec(folder, weights), "bf16")
    plain = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device}, **how)
    ids = random_ids(size.batch, size.window).to(device)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    model, values, step = lora_training(plain, loss)
    return Steps(step, model, values)


def _spec(folder: Path, weights: str) -> BaseSpec:
    format: Any = None if weights == "bf16" else weights  # the checkpoint is in bf16
    return BaseSpec(name=str(folder), weights=format)


def attention_check(shape: str, weights: str) -> str:
    """Return the name of the check of Coterie's attention on a base."""
    return f"fused attention, {shape}, {weights}"


def not_measured(shape: str, weights: str, note: str = NOT_RUN) -> list[Row]:
    """Return rows without measurements for a base."""
    return [Row(shape, weights, mode, c, note=note) for mode in MODES for c in CONTESTANTS]


def compare_with_peft(
    folder: Path, weights: str, size: Size, device: torch.device
) -> tuple[list[Row], Check]:
    """Measure both contestants on a base, and find the attention kernel of Coterie's steps.

    Args:
        folder: The folder of the base. It is named after the shape of the base, and is created if
            it does not exist yet.
        weights: The format of the base's weights.
        size: The size and the number of the steps.
        device: The device of the base.
    """
    name = attention_check(folder.name, weights)
    try:
        if not folder.exists():
            make_base(folder, folder.name)
        pair = {
            "Coterie": Contestant(lambda: ours(folder, weights, size, device), device),
            "PEFT": Contestant(lambda: peft(folder, weights, size, device), device),
        }
        assert pair["Coterie"].steps.values == pair["PEFT"].steps.values
        kernel = attention(pair["Coterie"], name)
        return list(measured(folder.name, weights, pair, size)), kernel
    except Exception as error:  # for example, the base does not fit into memory
        note = failure(error)
        return not_measured(folder.name, weights, note), Check(name, note, works=False)


def measured(shape: str, weights: str, pair: dict[str, Contestant], size: Size) -> Iterator[Row]:
    """Yield the measurements of the contestants, first in eager mode and then compiled."""
    for mode in MODES:
        notes = {name: _warm_up(c, size, mode == "compiled") for name, c in pair.items()}
        able = {name: c for name, c in pair.items() if not notes[name].startswith(FAILS)}
        turns = [{name: c.measure() for name, c in able.items()} for _ in range(size.steps)]
        for name, contestant in pair.items():
            row = Row(shape, weights, mode, name, note=notes[name])
            if name in able:
                seconds, peaks = zip(*(turn[name] for turn in turns), strict=True)
                speed = size.batch * size.window / statistics.median(seconds)
                peak = max(peaks) if contestant.device.type == "cuda" else None
                row = Row(shape, weights, mode, name, speed, peak, notes[name])
            yield row


def _warm_up(contestant: Contestant, size: Size, compiles: bool) -> str:
    """Take steps that are not measured, and return the note of the contestant's row."""
    counters.clear()
    if compiles:
        contestant.steps.compilable.compile(backend=size.backend)
    try:
        for _ in range(size.warm_up):
            contestant.measure()
    except Exception as error:  # memory runs out, and compilers raise exceptions of many classes
        return failure(error)
    breaks = sum(counters["graph_break"].values())
    return f"{breaks} graph breaks" if breaks else ""


def attention(contestant: Contestant, name: str) -> Check:
    """Find the attention kernels of a step."""
    try:
        with profile(activities=[ProfilerActivity.CPU]) as events:
            contestant.measure()
    except Exception as error:  # see _warm_up
        return Check(name, failure(error), works=False)
    keys = [event.key for event in events.key_averages() if event.key.startswith(ATTENTION)]
    kernels = sorted({key.removeprefix(ATTENTION) for key in keys if "backward" not in key})
    fused = bool(kernels) and not any(kernel.startswith("attention_math") for kernel in kernels)
    return Check(name, ", ".join(kernels) or "plain products", fused)


def cells(row: Row, rows: list[Row]) -> list[str]:
    """Format a row, with ratios to the row of PEFT in the same mode."""
    place = (row.shape, row.weights, row.mode)
    peft = next(r for r in rows if (r.shape, r.weights, r.mode, r.contestant) == (*place, "PEFT"))
    target = row is not peft and row.shape in SPEED
    return [
        f"{row.shape}, {row.weights}",
        row.mode,
        row.contestant,
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        _ratio(row.tokens_per_second, peft.tokens_per_second),
        f">= {SPEED[row.shape]:.2f}" if target else "",
        "" if row.peak is None else f"{row.peak / MIB:,.0f}",
        _ratio(row.peak, peft.peak),
        f"<= {PEAK:.2f}" if target else "",
        row.note,
    ]


def _ratio(value: float | None, reference: float | None) -> str:
    return "" if value is None or reference is None else f"{value / reference:.2f}"
