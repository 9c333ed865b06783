"""What memory and time one training step on a long window takes, with and without checkpointing.

A base of Llama-3.2-1B's shape (random weights), or with --small one of a quarter of its width and
half of its layers, and CoMiGS-1G1S at rank 8: forward, backward and an AdamW step of the experts
on one sample. Every step has a fresh process; its peak is that of the whole process, from the first
import on (Linux's ru_maxrss), and stands beside what the process held before the step.
"""

import argparse
import json
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from coterie.adapters import Adapter, Layout
from coterie.bases.precision import Precision, autocast, prepare
from coterie.losses.tokens import language_model_loss
from coterie.training.checkpointing import checkpointing

MIB = 2**20
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
SMALL: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
ROLES = ("dense", "generalist", "specialist")


@dataclass(frozen=True)
class Step:
    """What a step needed: bytes and seconds."""

    window: int
    checkpointing: bool
    before: int
    """What the process held with the base and the adapter."""
    peak: int
    """The most that it held in the step; at least the most while the base was made."""
    seconds: float
    """The process's own time, on all threads: steadier on a machine that others use."""


def held() -> int:
    """Bytes that this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def made(shape: dict[str, Any], precision: Precision, window: int) -> LlamaForCausalLM:
    """A base as it is trained: in bf16, its linear layers alone. It is made in bf16 as a whole, so
    that the peak is not that of making it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
    try:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        if isinstance(module, nn.Embedding | LlamaRMSNorm):
            module.float()
    prepare(model, precision, window)
    return model


def measure(small: bool, window: int, on: bool, precision: Precision, threads: int) -> Step:
    """One step; to be called once per process, as a peak never falls."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = SMALL if small else SHAPE
    model = made(shape, precision, window)
    adapter = Adapter(model, Layout(), seed=0, client="ada", common=lambda part: False)
    adapter.attach(model)
    adapter.require_grad(*ROLES)
    optimiser = torch.optim.AdamW(adapter.parameters(*ROLES).values())
    ids = torch.randint(shape["vocab_size"], (1, window + 1))
    before, start = held(), time.process_time()
    with checkpointing(model, 0.0) if on else nullcontext(), autocast(precision, "cpu"):
        loss = language_model_loss(model, ids)
    loss.backward()
    optimiser.step()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Step(window, on, before, peak, seconds)


def show(steps: list[Step], title: str) -> None:
    table = Table(title=title)
    for column in ("window", "checkpointing", "before MiB", "peak MiB", "step MiB", "CPU s"):
        table.add_column(column, justify="right")
    for row in steps:
        sizes = (row.before, row.peak, row.peak - row.before)
        on = "yes" if row.checkpointing else "no"
        figures = [f"{size / MIB:,.0f}" for size in sizes]
        table.add_row(f"{row.window:,}", on, *figures, f"{row.seconds:.1f}")
    table.caption = "step: the peak, less what was held before"
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", default="1024,4096", help="tokens of a sample")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    steps = []
    fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with fresh:
        for window in map(int, options.windows.split(",")):
            for on in (False, True):
                common = (options.precision, options.threads)
                steps.append(fresh.submit(measure, options.small, window, on, *common).result())
    size = "small" if options.small else "Llama-3.2-1B's shape"
    show(steps, f"One training step, 1 sample, {size}, {options.precision}, CPU")
    if options.json:
        record = {"small": options.small, "precision": options.precision}
        rows = [asdict(step) for step in steps]
        options.json.write_text(json.dumps({**record, "steps": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
