"""The memory that `coterie base` computes for a client, beside the measured memory of a run.

The bases are SmolLM2-135M, and three bases with random weights: GPT-2's shape in fp32, and the
shapes of Qwen2.5-0.5B and Llama-3.2-1B in bf16. Each row is a run of one client, two rounds of two
steps through the public API, in a fresh process. The measured peak is the peak of the whole process
(Linux's ru_maxrss).

`--papers` prints the computed table of docs/use/bases.md instead, and measures nothing.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import MIB, fresh, make_base, options_of, peak, save, show, write
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import coterie
from coterie.analysis.need import Need, need_of
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
}
"""The window and the batch, by base."""


def make(folder: Path, name: str) -> None:
    """Save a base with random weights, unless the base exists already."""
    if name == SMOLLM2:
        return
    if name == "llama-1b":
        make_base(folder, "1b")
        return
    kind, settings = SMALLER[name]
    save(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)), folder)


def run_of(folder: Path, name: str) -> dict[str, Any]:
    """A run of one client on a base in a folder."""
    window, batch = STEPS[name]
    (folder / "anna.txt").write_text("the sea was calm and no one knew which way to go. " * 8000)
    return {
        "base": name if name == SMOLLM2 else str(folder / name),
        "data_root": str(folder),
        "clients": [{"name": "anna", "path": "anna.txt"}],
        "method": "comigs-1g1s",
        "rounds": 2,
        "data": {"window": window, "limits": {"train": 20_000, "validation": 2000, "test": 2000}},
        "training": {"batch": batch, "steps": 2},
        "evaluation": {"batch": 2, "keep": "last"},
    }


def computed(run: dict[str, Any]) -> Need:
    """Return the needs of the run's client."""
    need = need_of(parse(run), "anna")
    assert need is not None, "the needs of this method are known"
    return need


def measured(run: dict[str, Any], out: Path) -> tuple[int, int]:
    """Peaks after the imports and after the run."""
    before = peak()
    coterie.run(run, out=out)
    return before, peak()


def main() -> None:
    """Print the table."""
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--bases", nargs="*", default=[*STEPS], choices=[*STEPS])
    options = parser.parse_args()
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
