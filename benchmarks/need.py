"""Compare the memory that `coterie base` computes for a client with the measured memory of a run.

The bases are SmolLM2-135M, and bases with random weights: GPT-2's shape in fp32, Qwen2.5-0.5B's
shape in bf16, and Llama-3.2-1B's shape in bf16, nf4 and int8. Each row is a run of one client with
two rounds of two steps, through the public API and in a fresh process. The measured peak is the
peak of the whole process (Linux's ru_maxrss).

`--papers` prints the computed table of docs/use/bases.md instead, and measures nothing.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import MIB, fresh, llama, make_base, options_of, peak, save, show, write
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import coterie
from coterie.analysis.held import QUANTISED
from coterie.analysis.need import Need, need_from, need_of
from coterie.analysis.shapes import shapes_of
from coterie.bases import load_tokenizer
from coterie.bases.gguf import SMOLLM2
from coterie.config.run import parse

SMALLER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "qwen-0.5b": (
        "qwen2",
        {
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
}
STEPS = {
    "smollm2-135m": (256, 4),
    "gpt2": (128, 8),
    "qwen-0.5b": (512, 2),
    "llama-1b": (128, 2),
    "llama-1b-nf4": (128, 2),
    "llama-1b-int8": (128, 2),
}
"""The window and the batch, by base."""
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
PAPER_METHODS = ("auto", "comigs-1g1s", "pcl-2")
PAPER_SETTINGS: dict[str, Any] = {
    "data": {"window": 1024},
    "training": {"batch": 8, "micro_batch": 2},
    "evaluation": {"batch": 2},
}
PAPER_COLUMNS = (
    *("base", "method", "client, bf16 (GiB)", "int8", "nf4"),
    *("upload (MiB)", "download (MiB)", "server (GiB)", "disk (GiB)"),
)


def make(folder: Path, name: str) -> None:
    """Save a base with random weights, unless the base exists already."""
    if name == SMOLLM2:
        return
    if name.startswith("llama-1b"):
        make_base(folder, "1b")
        return
    kind, settings = SMALLER[name]
    save(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)), folder)


def run_of(folder: Path, name: str) -> dict[str, Any]:
    """A run of one client on a base in a folder."""
    window, batch = STEPS[name]
    weights = next((kind for kind in QUANTISED if name.endswith(kind)), None)
    (folder / "anna.txt").write_text("the sea was calm and no one knew which way to go. " * 8000)
    return {
        "base": {"name": name if name == SMOLLM2 else str(folder / name), "weights": weights},
        "data_root": str(folder),
        "clients": [{"name": "anna", "path": "anna.txt"}],
        "method": "comigs-1g1s",
        "rounds": 2,
        "data": {"window": window, "limits": {"train": 20_000, "validation": 2000, "test": 2000}},
        "training": {"batch": batch, "steps": 2},
        "evaluation": {"batch": 2, "keep": "last"},
    }


def computed(run: dict[str, Any]) -> Need:
    """Return the computed needs of a run's client."""
    need = need_of(parse(run), "anna")
    assert need is not None, "the needs of this method are known"
    return need


def measured(run: dict[str, Any], out: Path) -> tuple[int, int]:
    """Peaks after the imports and after the run."""
    before = peak()
    coterie.run(run, out=out)
    return before, peak()


def write_paper_base(folder: Path, name: str) -> str:
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


def paper_row(base: str, method: str) -> tuple[str, ...]:
    """Return a row of the table: what runs of 4 to 50 clients need."""
    few, many = (paper_figures(base, method, count) for count in (4, 50))
    spans = [
        low if low == high else f"{low} to {high}" for low, high in zip(few, many, strict=True)
    ]
    return Path(base).name, method, *spans


def paper_figures(base: str, method: str, count: int) -> tuple[str, ...]:
    """Return the figures of a row for a number of clients, computed for a GPU."""
    clients = [{"name": f"client-{number}", "path": "x"} for number in range(count)]
    shared = {"base": base, "clients": clients, "method": method, "rounds": 100}
    config = parse({**shared, **PAPER_SETTINGS})
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


def papers() -> None:
    """Print the table of docs/use/bases.md as Markdown."""
    print("| " + " | ".join(PAPER_COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * (len(PAPER_COLUMNS) - 2))
    with TemporaryDirectory() as place:
        for name in ("Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B"):
            base = write_paper_base(Path(place), name)
            for method in PAPER_METHODS:
                print("| " + " | ".join(paper_row(base, method)) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--bases", nargs="*", default=[*STEPS], choices=[*STEPS])
    parser.add_argument("--papers", action="store_true", help="print the computed table only")
    options = parser.parse_args()
    if options.papers:
        papers()
        return
    logging.disable_progress_bar()
    columns = ("base", "tokens at once", "computed (MiB)", "measured (MiB)", "ratio")
    rows = []
    for name in options.bases:
        with TemporaryDirectory() as place:
            folder = Path(place)
            fresh(make, folder / name, name)
            run = run_of(folder, name)
            need = fresh(computed, run)
            imports, most = fresh(measured, run, folder / "run")
        estimate, (window, batch) = imports + need.memory, STEPS[name]
        figures = (f"{estimate / MIB:,.0f}", f"{most / MIB:,.0f}", f"{estimate / most:.2f}")
        rows.append((name, f"{batch} x {window}", *figures))
    show("Memory of one client", columns, rows)
    write(options, rows=[dict(zip(columns, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
