"""Print the table of docs/use/bases.md with what runs on bases of 1 to 8 billion parameters need.

All figures are computed from shapes. Nothing is measured, and no weights are needed.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import MIB, llama
from transformers import AutoConfig

from coterie.analysis.need import need_from
from coterie.analysis.shapes import shapes_of
from coterie.bases import load_tokenizer
from coterie.config.run import parse

QWEN3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "architectures": ["Qwen3ForCausalLM"],
}
METHODS = ("auto", "comigs-1g1s", "pcl-2")
SETTINGS: dict[str, Any] = {
    "data": {"window": 1024},
    "training": {"batch": 8, "micro_batch": 2},
    "evaluation": {"batch": 2},
}
COLUMNS = (
    *("base", "method", "client, bf16 (GiB)", "int8", "nf4"),
    *("upload (MiB)", "download (MiB)", "server (GiB)", "disk (GiB)"),
)


def write_base(folder: Path, name: str) -> str:
    """Write the configuration of a base and a smaller tokenizer, without weights."""
    if name == "Qwen3-4B":
        config = AutoConfig.for_model("qwen3", **QWEN3_4B)
    else:
        shape = {"Llama-3.2-1B": "1b", "Llama-3.1-8B": "8b"}[name]
        classes = ["LlamaForCausalLM"]
        config = llama(shape, max_position_embeddings=8192, dtype="bfloat16", architectures=classes)
    config.save_pretrained(folder / name)
    load_tokenizer("tiny-gpt2").save_pretrained(folder / name)
    return str(folder / name)


def row(base: str, method: str) -> tuple[str, ...]:
    """Return a row of the table: what runs of 4 to 50 clients need."""
    few, many = (figures(base, method, count) for count in (4, 50))
    spans = [
        low if low == high else f"{low} to {high}" for low, high in zip(few, many, strict=True)
    ]
    return Path(base).name, method, *spans


def figures(base: str, method: str, count: int) -> tuple[str, ...]:
    """Return the figures of a row for a number of clients, computed for a GPU."""
    clients = [{"name": f"client-{number}", "path": "x"} for number in range(count)]
    shared = {"base": base, "clients": clients, "method": method, "rounds": 100}
    config = parse({**shared, **SETTINGS})
    shapes = shapes_of(config, "client-0")
    assert shapes is not None, "the needs of this method are known"
    needs = [
        need_from(shapes, config.model_copy(update={"base": spec}), "cuda")
        for weights in (None, "int8", "nf4")
        for spec in [config.base.model_copy(update={"weights": weights})]
    ]
    sizes = needs[0].exchange
    assert sizes is not None, "the messages of this method are known"
    large = max(sizes.up, sizes.down + sizes.peers) > 2**30
    memory = [f"{need.memory / 2**30:,.1f}" for need in needs]
    traffic = [f"{size / MIB:,.0f}" for size in (sizes.up, sizes.down + sizes.peers)]
    server, disk = (f"{size / 2**30:,.1f}" for size in (sizes.server, needs[0].disk))
    return *memory, traffic[0], traffic[1] + "*" * large, server, disk


def main() -> None:
    """Print the table."""
    print("| " + " | ".join(COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * (len(COLUMNS) - 2))
    with TemporaryDirectory() as place:
        for name in ("Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B"):
            base = write_base(Path(place), name)
            for method in METHODS:
                print("| " + " | ".join(row(base, method)) + " |", flush=True)


if __name__ == "__main__":
    main()
