"""What memory and time one training step on a long window takes, with and without checkpointing.

A base of Llama-3.2-1B's shape (random weights), or with --small one of a quarter of its width and
half of its layers, and CoMiGS-1G1S at rank 8: forward, backward and an AdamW step of the experts
on one sample. Every step has a fresh process; its peak is that of the whole process, from the first
import on (Linux's ru_maxrss), and stands beside what the process held before the step.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from common import MIB, fresh, llama, options_of, peak, resident, show, write
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from coterie.adapters import Adapter, Layout, of_roles
from coterie.bases.precision import Precision, autocast, prepare
from coterie.losses.tokens import language_model_loss
from coterie.training.checkpointing import checkpointing

SMALL = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192}
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


def made(small: bool, precision: Precision, window: int) -> LlamaForCausalLM:
    """Create a base with the dtypes of training: with bf16, only linear layers are in bf16.

    The whole base is created in bf16, so that its creation does not determine the memory peak.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
    try:
        shape, changes = ("quarter", SMALL) if small else ("1b", {})
        model = LlamaForCausalLM(llama(shape, max_position_embeddings=131072, **changes))
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
    model = made(small, precision, window)
    adapter = Adapter(model, Layout(), seed=0, client="ada", common=lambda _: False)
    adapter.attach(model)
    adapter.require_grad(of_roles(*ROLES))
    optimiser = torch.optim.AdamW(adapter.tensors(of_roles(*ROLES)).values())
    ids = torch.randint(model.config.vocab_size, (1, window + 1))
    before, start = resident("VmRSS"), time.process_time()
    with checkpointing(model, 0.0) if on else nullcontext(), autocast(precision, "cpu"):
        loss = language_model_loss(model, ids)
    loss.backward()
    optimiser.step()
    seconds = time.process_time() - start
    return Step(window, on, before, peak(), seconds)


def cells(row: Step) -> list[str]:
    sizes = (row.before, row.peak, row.peak - row.before)
    figures = [f"{size / MIB:,.0f}" for size in sizes]
    return [f"{row.window:,}", "yes" if row.checkpointing else "no", *figures, f"{row.seconds:.1f}"]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--windows", default="1024,4096", help="tokens of a sample")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    options = parser.parse_args()
    common = (options.precision, options.threads)
    steps = [
        fresh(measure, options.small, int(window), on, *common)
        for window in options.windows.split(",")
        for on in (False, True)
    ]
    size = "small" if options.small else "Llama-3.2-1B's shape"
    show(
        f"One training step, 1 sample, {size}, {options.precision}, CPU",
        ("window", "checkpointing", "before MiB", "peak MiB", "step MiB", "CPU s"),
        [cells(step) for step in steps],
        "step: the peak, less what was held before",
    )
    write(options, steps=steps)


if __name__ == "__main__":
    main()
