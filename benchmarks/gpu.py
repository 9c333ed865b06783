"""What a GPU makes of training: tokens per second and peak memory, beside PEFT's.

Bases have the shapes of Llama-3.2-1B and Llama-3.1-8B, random weights, and bf16 or nf4. A step is
of CoMiGS-1G1S at rank 8, through Coterie's own client side, or of PEFT's LoRA with as many trained
values, both in bf16 autocast with AdamW. The two take turns, eager and then compiled: Coterie's
decoder, and PEFT's whole model, by torch.compile. Then a small run through the public API tells
whether training, evaluation, generation and resuming work on the device.

A contestant's peak is what it holds between its steps and what a step adds: the memory that the
other holds meanwhile does not count.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bases import client_side, lora_training
from common import MIB, make_base, options_of, random_ids, show, write
from memory import make_texts
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import coterie
from coterie.adapters import of_roles
from coterie.bases import BaseSpec, load_base
from coterie.bases.devices import devices_of
from coterie.bases.sites import decoder_of
from coterie.bases.weights import format_of
from coterie.errors import CoterieError
from coterie.runs import Callback, RunFolder

SPEED, PEAK = {"1b": 1.0, "8b": 0.95}, 1.1
"""Smallest share of PEFT's tokens per second, by shape, and largest share of its peak."""
FAILS = "fails:"
COLUMNS = (
    *("base", "mode", "contestant", "tokens/s", "x PEFT", "target"),
    *("peak MiB", "x PEFT", "target", "note"),
)
ATTENTION = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Size:
    """What a step reads, and how many there are."""

    batch: int
    window: int
    warm_up: int
    turns: int


FULL, SMALL = Size(4, 1024, 3, 10), Size(2, 32, 1, 2)


@dataclass(frozen=True)
class Row:
    """How one contestant did; nothing is known where its steps failed."""

    shape: str
    weights: str
    mode: str
    who: str
    tokens_per_second: float | None = None
    peak: int | None = None
    """Bytes; None on a CPU."""
    note: str = ""


@dataclass(frozen=True)
class Check:
    """Something that should work on the device."""

    what: str
    found: str
    works: bool


class Contestant:
    """A training step on a device, and what it holds there between its steps."""

    def __init__(self, make: Callable[[], "Steps"], device: torch.device) -> None:
        self.device = device
        before = self._allocated()
        self.made = make()
        self.held = self._allocated() - before

    def turn(self) -> tuple[float, int]:
        """Seconds of a step, and the peak of memory in bytes."""
        before = self._allocated()
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        self.made.step()
        if self._counts:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        highest = torch.cuda.max_memory_allocated(self.device) if self._counts else 0
        peak = self.held + highest - before
        self.held += self._allocated() - before
        return seconds, peak

    @property
    def _counts(self) -> bool:
        """Whether the device tells its memory."""
        return self.device.type == "cuda"

    def _allocated(self) -> int:
        if not self._counts:
            return 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)


@dataclass(frozen=True)
class Steps:
    """A training step, what of it can be compiled, and how many LoRA values it trains."""

    step: Callable[[], object]
    compilable: nn.Module
    values: int


def ours(folder: Path, weights: str, size: Size, device: torch.device) -> Steps:
    """Coterie's local training."""
    base = load_base(_spec(folder, weights), "bf16", size.window, device=str(device))
    side = client_side(base, size.batch, size.window)
    lora = side.adapter.tensors(of_roles("dense", "generalist", "specialist"))
    values = sum(parameter.numel() for parameter in lora.values())
    return Steps(lambda: side.train(0), decoder_of(base.model), values)


def peft(folder: Path, weights: str, size: Size, device: torch.device) -> Steps:
    """PEFT's LoRA, with a model and an optimiser as in its documentation."""
    how = format_of(_spec(folder, weights), "bf16")
    plain = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device}, **how)
    ids = random_ids(size.batch, size.window).to(device)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    model, values, step = lora_training(plain, loss)
    return Steps(step, model, values)


def _spec(folder: Path, weights: str) -> BaseSpec:
    format: Any = None if weights == "bf16" else weights  # bf16 is as kept
    return BaseSpec(name=str(folder), weights=format)


def beside_peft(
    folder: Path, weights: str, size: Size, device: torch.device, compiles: bool
) -> tuple[list[Row], Check]:
    """Both contestants on a base, and the kernel of attention that Coterie's steps use."""
    common = (folder, weights, size, device)
    pair = {
        "Coterie": Contestant(lambda: ours(*common), device),
        "PEFT": Contestant(lambda: peft(*common), device),
    }
    assert pair["Coterie"].made.values == pair["PEFT"].made.values
    kernel = attention(pair["Coterie"], f"{folder.name}, {weights}")
    return list(measured(folder.name, weights, pair, size, compiles)), kernel


def measured(
    shape: str, weights: str, pair: dict[str, Contestant], size: Size, compiles: bool
) -> Iterator[Row]:
    """How the contestants do, eager and then compiled."""
    for mode in ("eager", "compiled") if compiles else ("eager",):
        notes = {name: _warmed(one, size, mode == "compiled") for name, one in pair.items()}
        able = {name: one for name, one in pair.items() if not notes[name].startswith(FAILS)}
        turns = [{name: one.turn() for name, one in able.items()} for _ in range(size.turns)]
        for name, one in pair.items():
            row = Row(shape, weights, mode, name, note=notes[name])
            if name in able:
                seconds, peaks = zip(*(turn[name] for turn in turns), strict=True)
                speed = size.batch * size.window / statistics.median(seconds)
                peak = max(peaks) if one.device.type == "cuda" else None
                row = Row(shape, weights, mode, name, speed, peak, notes[name])
            yield row


def _warmed(contestant: Contestant, size: Size, compiles: bool) -> str:
    """Take steps that do not count; what is to be said of them."""
    counters.clear()
    if compiles:
        contestant.made.compilable.compile()
    try:
        for _ in range(size.warm_up):
            contestant.turn()
    except Exception as error:  # memory runs out, and compilers raise whatever they like
        return _failure(error)
    breaks = sum(counters["graph_break"].values())
    return f"{breaks} graph breaks" if breaks else ""


def _failure(error: Exception) -> str:
    said = str(error).strip() or "no message"
    return f"{FAILS} {type(error).__name__}: {said.splitlines()[0]:.60}"


def attention(contestant: Contestant, what: str) -> Check:
    """Which kernel of attention a step uses."""
    what = f"fused attention, {what}"
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            contestant.turn()
    except Exception as error:  # as above
        return Check(what, _failure(error), False)
    keys = [event.key for event in seen.key_averages() if event.key.startswith(ATTENTION)]
    found = sorted({key.removeprefix(ATTENTION) for key in keys if "backward" not in key})
    fused = bool(found) and not any(name.startswith("attention_math") for name in found)
    return Check(what, ", ".join(found) or "plain products", fused)


def public(base: Path, device: torch.device, size: Size, folder: Path) -> Iterator[Check]:
    """What a run of two rounds makes through the public API, and one that is stopped between."""
    config = {
        "base": str(base),
        "device": str(device),
        "method": {"name": "comigs-1g1s", "router": {"every": 2, "steps": 1}},
        "rounds": 2,
        "data_root": str(folder),
        "clients": make_texts(folder, 2),
        "data": {"window": min(size.window, 128), "limits": {"test": 600}},
        "training": {"steps": 2, "batch": size.batch, "precision": "bf16"},
    }
    run = coterie.run(config, out=folder / "whole")
    result = run.results["comigs-1g1s"]
    perplexities = [score["perplexity"] for score in result[result["reports"]].values()]
    finite = bool(torch.tensor(perplexities).isfinite().all())
    found = "perplexity " + ", ".join(f"{value:,.0f}" for value in perplexities)
    yield Check("training and evaluation", found, finite)

    model: Any = run.model("client-00")
    prompt = torch.tensor([[0, 1, 2, 3]], device=model.device)
    written = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    there = written.device.type == device.type
    yield Check("generation", f"{written.shape[1] - 4} tokens on {written.device}", there)

    yield _resumed(config, folder / "again", run.path, "resume")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        exact = coterie.run(config, out=folder / "exact").path
        yield _resumed(config, folder / "exact-again", exact, "resume, deterministic algorithms")
    finally:
        torch.use_deterministic_algorithms(False)


class Stopped(Exception):
    """A run was stopped by a callback."""


class StopAfterFirstRound(Callback):
    """Stops a run as Ctrl-C would."""

    def on_round_end(self, round: int, scores: str) -> None:
        """Stop the run once its first round is saved."""
        raise Stopped


def _resumed(config: dict[str, Any], path: Path, whole: Path, what: str) -> Check:
    """Whether a run that is stopped and resumed ends in the bits of one that was not."""
    with suppress(Stopped):
        coterie.run(config, out=path, callbacks=[StopAfterFirstRound()])
    assert RunFolder(path).result is None, "it was stopped"
    coterie.resume(path)
    name = "client-client-00"
    one, other = (RunFolder(folder).load(name)["adapter"] for folder in (whole, path))
    furthest = max((one[key] - other[key]).abs().max().item() for key in one)
    same = all(torch.equal(one[key], other[key]) for key in one)
    found = "same bits" if same else f"values differ by up to {furthest:.1e}"
    return Check(what, found, same)


def cells(row: Row, rows: list[Row]) -> list[str]:
    """Ratios are to PEFT in the same mode."""
    place = (row.shape, row.weights, row.mode)
    peft = next(r for r in rows if (r.shape, r.weights, r.mode, r.who) == (*place, "PEFT"))
    target = row is not peft and row.shape in SPEED
    return [
        f"{row.shape}, {row.weights}",
        row.mode,
        row.who,
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        _ratio(row.tokens_per_second, peft.tokens_per_second),
        f">= {SPEED[row.shape]:.2f}" if target else "",
        "" if row.peak is None else f"{row.peak / MIB:,.0f}",
        _ratio(row.peak, peft.peak),
        f"<= {PEAK:.2f}" if target else "",
        row.note,
    ]


def show_all(rows: list[Row], checks: list[Check], size: Size, device: str) -> None:
    """Both tables."""
    show(
        f"Training steps, {size.batch} x {size.window} tokens, {device}",
        COLUMNS,
        [cells(row, rows) for row in rows],
        "targets: tokens/s and peak, as shares of PEFT's",
    )
    works = [(check.what, check.found, "yes" if check.works else "no") for check in checks]
    show("On this device", ("what", "found", "works"), works)


def _ratio(mine: float | None, theirs: float | None) -> str:
    return "" if mine is None or theirs is None else f"{mine / theirs:.2f}"


def main() -> None:
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--small", action="store_true", help="a tiny base and few steps, to try it")
    parser.add_argument("--shapes", default="1b,8b", help="without --small")
    parser.add_argument("--weights", default="bf16,nf4", help="formats")
    parser.add_argument("--no-compile", action="store_true", help="eager steps only")
    options = parser.parse_args()
    try:
        (device,) = devices_of(options.device)
    except CoterieError as error:
        parser.error(str(error))
    size, shapes = (SMALL, "small") if options.small else (FULL, options.shapes)
    rows: list[Row] = []
    checks: list[Check] = []
    with TemporaryDirectory() as name:
        work = Path(name)
        for shape in shapes.split(","):
            make_base(work / shape, shape)
            for weights in options.weights.split(","):
                found, kernel = beside_peft(
                    work / shape, weights, size, device, not options.no_compile
                )
                rows += found
                checks.append(kernel)
                gc.collect()  # models refer to themselves
                torch._dynamo.reset()
        checks += public(work / shapes.split(",")[0], device, size, work)
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    show_all(rows, checks, size, on)
    targets = {"tokens_per_second": SPEED, "peak": PEAK}
    found = {"size": size, "targets": targets, "rows": rows, "checks": checks}
    write(options, **{**found, "device": on, "torch": torch.__version__})


if __name__ == "__main__":
    main()
