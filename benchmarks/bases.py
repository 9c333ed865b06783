"""How much memory a large base needs: to load it, and to train an adapter on it, beside PEFT's.

A base of Llama-3.2-1B's shape, or of Llama-3.1-8B's, with random weights in bf16, is written to a
folder, which may be kept. Each row is a fresh process. Its peaks are those of the whole process
(Linux's ru_maxrss): after the imports, after loading and a forward pass, and after training steps
of CoMiGS-1G1S at rank 8 on 2 x 128 tokens. PEFT trains the same number of parameters: rank 16 on
MLPs and 8 on attention. A checkpoint's pages are read as they are used, and count for both; the
system can take them back, so `own` is the peak without them, looked at twenty times a second.
"""

import argparse
import json
import math
import resource
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coterie.bases import Base, BaseSpec, load_base, load_tokenizer
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import Participant, client_context
from coterie.losses.tokens import language_model_loss
from coterie.methods.adapter import AdapterClient
from coterie.seeding import generator

MIB = 2**20
VOCABULARY = 128256
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "small": {  # to try a benchmark
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
}
BATCH, WINDOW, RANK = 2, 128, 8
LOADING, TRAINING = 1.1, 1.1
"""Largest share of the file's size that loading adds, and of PEFT's peak that training reaches."""


@dataclass(frozen=True)
class Row:
    """One process: bytes, seconds and nats per token."""

    what: str
    imports: int
    loaded: int
    trained: int
    own: int
    parameters: int
    step: float
    loss: float
    """Of the base alone, on the tokens of the forward pass after loading."""


def make_base(folder: Path, shape: str) -> int:
    """Write a base in shards of a layer each, of which one is held at a time; its bytes."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        **SHAPES[shape],
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
    return size


def _random(noise: Tensor, shape: torch.Size) -> Tensor:
    """Norms are ones; the rest is noise, again and again where it does not suffice."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=noise.dtype)
    count = math.prod(shape)
    return noise.repeat(-(-count // len(noise)))[:count].view(shape).clone()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Own(threading.Thread):
    """The process's peak of memory that is no file's, in bytes (RssAnon)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        """Look, and look again."""
        while True:
            status = Path("/proc/self/status").read_text()
            now = int(status.partition("RssAnon:")[2].split()[0]) * 1024
            self.peak = max(self.peak, now)
            time.sleep(0.05)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=generator(0, "ids"))


def timed(step: Callable[[int], object], steps: int) -> float:
    """Median seconds of some steps after a first one, which is no different but for its caches."""
    seconds = []
    for number in range(steps + 1):
        began = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:] or seconds)


def client_side(base: Base, batch: int, window: int) -> AdapterClient:
    """A client of CoMiGS-1G1S on random tokens; its rounds are one step of the experts each."""
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
    text = Tokens(random_ids(2**14).int(), 2**16)
    participant = Participant("ada", ClientData(text, text, text), {})
    side = config.method.client(client_context(config, base, participant, lambda *_: None))
    assert isinstance(side, AdapterClient)
    return side


def ours(folder: Path, weights: Any, steps: int, threads: int) -> Row:
    """Coterie's local training; to be called once per process, as a peak never falls."""
    torch.set_num_threads(threads)
    imports, own = peak(), Own()
    base = load_base(BaseSpec(name=str(folder), weights=weights), "bf16", WINDOW)
    with torch.no_grad():
        loss = language_model_loss(base.model, random_ids(BATCH, WINDOW + 1)).item()
    loaded = peak()
    side = client_side(base, BATCH, WINDOW)
    step = timed(side.train, steps)
    count = sum(parameter.numel() for parameter in side.adapter.parameters().values())
    what = f"Coterie, {weights or 'bf16, as kept'}"
    return Row(what, imports, loaded, peak(), own.peak, count, step, loss)


def with_lora(plain: Any) -> Any:
    """PEFT's model with as many LoRA values as CoMiGS-1G1S has at rank 8."""
    mlp = "gate_proj|up_proj|down_proj"
    how = LoraConfig(r=RANK, target_modules="all-linear", rank_pattern={mlp: 2 * RANK})
    return get_peft_model(plain, how)


def peft(folder: Path, weights: Any, steps: int, threads: int) -> Row:
    """PEFT, with a model and an optimiser as in its documentation."""
    del weights
    torch.set_num_threads(threads)
    imports, own = peak(), Own()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = random_ids(BATCH, WINDOW + 1)
    with torch.no_grad():
        loss = plain(input_ids=ids, labels=ids).loss.item()
    loaded = peak()
    model = with_lora(plain)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-3)

    def step(number: int) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    seconds = timed(step, steps)
    count = sum(parameter.numel() for parameter in trained)
    return Row("PEFT, bf16", imports, loaded, peak(), own.peak, count, seconds, loss)


def show(rows: list[Row], size: int, shape: str) -> None:
    table = Table(
        title=f"A base of {shape}, {size / MIB:,.0f} MiB in bf16; {BATCH} x {WINDOW} tokens"
    )
    columns = (
        "imports",
        "loaded",
        "x file",
        "trained",
        "x PEFT",
        "own",
        "parameters",
        "s/step",
        "loss",
    )
    table.add_column("MiB")
    for column in columns:
        table.add_column(column, justify="right")
    theirs = next((row.trained for row in rows if row.what.startswith("PEFT")), None)
    for row in rows:
        table.add_row(
            row.what,
            f"{row.imports / MIB:,.0f}",
            f"{row.loaded / MIB:,.0f}",
            f"{(row.loaded - row.imports) / size:.2f}",
            f"{row.trained / MIB:,.0f}",
            "" if theirs is None else f"{row.trained / theirs:.2f}",
            f"{row.own / MIB:,.0f}",
            f"{row.parameters:,}",
            f"{row.step:.1f}",
            f"{row.loss:.4f}",
        )
    table.caption = f"targets of the first row: {LOADING} x file, {TRAINING} x PEFT"
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--weights", default="bf16,nf4", help="formats; bf16 is as kept")
    parser.add_argument("--without-peft", action="store_true", help="where its model does not fit")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, after a first")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--folder", type=Path, help="write the base here, or use that which is here"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with fresh, TemporaryDirectory() as name:
        folder = options.folder or Path(name) / "base"
        if not folder.exists():
            fresh.submit(make_base, folder, options.shape).result()
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        jobs = [(ours, None if w == "bf16" else w) for w in options.weights.split(",")]
        jobs += [] if options.without_peft else [(peft, None)]
        common = (options.steps, options.threads)
        rows = [fresh.submit(job, folder, weights, *common).result() for job, weights in jobs]
    show(rows, size, options.shape)
    if options.json:
        record = {"shape": options.shape, "size": size, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
