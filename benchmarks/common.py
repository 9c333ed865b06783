"""Shared functions of benchmarks: options, fresh processes, memory, bases, tables and records."""

import argparse
import json
import math
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coterie.bases import load_tokenizer
from coterie.runs import RunFolder
from coterie.seeding import generator

MIB = 2**20
VOCABULARY = 128256
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "head_dim", "tie_word_embeddings")
SHAPES: dict[str, tuple[Any, ...]] = {
    "1b": (2048, 16, 8192, 64, True),  # Llama-3.2-1B's
    "8b": (4096, 32, 14336, 128, False),  # Llama-3.1-8B's
    "small": (64, 2, 128, 8, True),  # to try a benchmark
}


def options_of(doc: str | None, threads: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options --json and, where it matters, --threads."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--json", type=Path, help="write the figures here")
    if threads:
        parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def write(options: argparse.Namespace, **figures: Any) -> None:
    """Write the options and figures to the file that --json names, if it does."""
    if options.json:
        record = {**vars(options), **figures}
        del record["json"]
        options.json.write_text(json.dumps(record, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""
) -> None:
    """Print a table."""
    from coterie.analysis.tables import Table  # late: memory is that of a process without it

    Console().print(Table(title, columns, rows, caption))


def fresh(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new process, whose peak memory is at least that of this process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def resident(which: str, pid: int | str = "self") -> int:
    """Return a process's resident memory in bytes.

    Args:
        which: VmRSS (at present), RssAnon (at present, without files) or VmHWM (the peak).
        pid: The process; by default this one.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{which}:")[2].split()[0]) * 1024


def peak() -> int:
    """Return the peak memory of this process in bytes, from its first import on."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recorded(folder: RunFolder, name: str) -> list[float]:
    """Return the values of a metric in a run folder, in order."""
    return [line["value"] for line in folder.metrics() if line["name"] == name]


def random_ids(*shape: int, vocabulary: int = VOCABULARY) -> Tensor:
    """Return random tokens; every call returns equal ones."""
    return torch.randint(vocabulary, shape, generator=generator(0, "ids"))


def gpt2() -> GPT2LMHeadModel:
    """Return a frozen model of GPT-2's shape (124M), with random weights and without dropout."""
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config).requires_grad_(False)


def llama(shape: str, **changes: Any) -> LlamaConfig:
    """Return the configuration of a Llama."""
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True))
    return LlamaConfig(**{"vocab_size": VOCABULARY, **heads, **sizes, **changes})


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save a base; its tokenizer is a smaller one that ships."""
    model.save_pretrained(folder)
    load_tokenizer("tiny-gpt2").save_pretrained(folder)


def make_base(folder: Path, shape: str) -> None:
    """Write a Llama in bf16 in shards of a layer each, of which one is held at a time."""
    config = llama(
        shape,
        max_position_embeddings=8192,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    load_tokenizer("tiny-gpt2").save_pretrained(folder)
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    places: dict[str, str] = {}
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in skeleton.named_parameters():
        shard = ".".join(name.split(".")[:3])
        shards.setdefault(f"{shard}.safetensors", {})[name] = parameter.shape
    noise = torch.empty(2**26, dtype=torch.bfloat16)
    noise.normal_(std=0.02, generator=generator(0, "weights"))
    size = 0
    for number, (file, shapes) in enumerate(shards.items()):
        tensors = {name: _random(noise.roll(number), shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shapes, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(noise: Tensor, shape: torch.Size) -> Tensor:
    """Return ones for a norm; otherwise noise, repeated if it is too short."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=noise.dtype)
    count = math.prod(shape)
    return noise.repeat(-(-count // len(noise)))[:count].view(shape).clone()
