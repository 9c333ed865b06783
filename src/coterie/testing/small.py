"""A run of seconds: a random base of two narrow layers, and a little of three writers."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from coterie.bases import EMBEDDED, load_tokenizer
from coterie.config import RunConfig, parse

WRITERS = ("diarist", "poet", "whaler")


def write_base(folder: Path) -> Path:
    """A GPT-2 of two layers and width 32, with random weights and tiny-gpt2's tokenizer."""
    tokenizer = load_tokenizer("tiny-gpt2")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(folder: Path) -> Path:
    """NAME.txt of each writer."""
    for name in WRITERS:
        text = (EMBEDDED / "demo-writers" / f"{name}.txt").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text[:30_000], encoding="utf-8")
    return folder


def small_values(base: Path, texts: Path, /, **changes: Any) -> dict[str, Any]:
    """A run as plain data; keyword arguments replace its keys."""
    return {
        "name": "small",
        "threads": 1,
        "base": str(base),
        "rounds": 3,
        "data_root": str(texts),
        "data": {"window": 16, "limits": {"train": 2000, "validation": 400, "test": 400}},
        "clients": [{"name": name, "path": f"{name}.txt"} for name in WRITERS],
        "training": {"steps": 2, "batch": 2, "precision": "fp32"},
    } | changes


def small_run(folder: Path, /, **changes: Any) -> RunConfig:
    """A run of three clients and two rounds, with a public text; keyword arguments replace keys."""
    base, texts = write_base(folder / "base"), write_texts(folder)
    values = small_values(base, texts, rounds=2)
    data = {**values["data"], "public": "poet.txt"}
    return parse({**values, "data": data, **changes})
