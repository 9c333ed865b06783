"""How much memory a large base needs: to load it, and to train an adapter on it, beside PEFT's.

A base of Llama-3.2-1B's shape, or of Llama-3.1-8B's, with random weights in bf16, is written to a
folder, which may be kept. Each row is a fresh process. Its peaks are those of the whole process
(Linux's ru_maxrss): after the imports, after loading and a forward pass, and after training steps
of CoMiGS-1G1S at rank 8 on 2 x 128 tokens (`--batch`). PEFT trains the same number of parameters:
rank 16 on MLPs and 8 on attention. A checkpoint's pages are read as they are used, and count for
both; the system can take them back, so `own` is the peak without them, looked at twenty times a
second. `upload` is the size of a client's message in a round, or of the folder that PEFT saves.

`--base smollm2-135m` takes a base that exists instead. `--chat` measures only the seconds to the
first token of `coterie chat` on this base, with one thread and with two: from the start of the
command, and from a second question. The model is a client's, after one step of training.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import (
    MIB,
    SHAPES,
    fresh,
    make_base,
    options_of,
    peak,
    random_ids,
    resident,
    show,
    take_turns,
    write,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import coterie
from coterie.bases import Base, BaseSpec, load_base
from coterie.bases.loading import place
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import Participant, client_context
from coterie.losses.tokens import language_model_loss
from coterie.methods.adapter import AdapterClient
from coterie.turn import FIRST, Turn

WINDOW, RANK = 128, 8
LOADING, TRAINING = 1.1, 1.1
"""Largest share of the file's size that loading adds, and of PEFT's peak that training reaches."""
COLUMNS = (
    *("MiB", "imports", "loaded", "x file", "trained", "x PEFT"),
    *("own", "parameters", "s/step", "loss", "upload MB"),
)


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
    upload: int
    """Bytes of a client's message in a round, or of PEFT's folder."""


class Own(threading.Thread):
    """The process's peak of memory that is no file's, in bytes (RssAnon)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        """Look, and look again."""
        while True:
            self.peak = max(self.peak, resident("RssAnon"))
            time.sleep(0.05)


def timed(step: Callable[[int], object], steps: int) -> float:
    """Median seconds of some steps after a first one, which is no different but for its caches."""
    numbers = count()
    return statistics.median(take_turns({"": lambda: step(next(numbers))}, steps)[""])


def ids_for(model: Any, *shape: int) -> Tensor:
    """Random tokens of a base's vocabulary."""
    return random_ids(*shape, vocabulary=model.get_input_embeddings().num_embeddings)


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
    text = Tokens(ids_for(base.model, 2**14).int(), 2**16)
    participant = Participant("ada", ClientData(text, text, text), {})
    side = config.method.client(client_context(config, base, participant, lambda *_: None))
    assert isinstance(side, AdapterClient)
    return side


def ours(folder: Path, weights: Any, steps: int, threads: int, batch: int) -> Row:
    """Coterie's local training; to be called once per process, as a peak never falls."""
    torch.set_num_threads(threads)
    imports, own = peak(), Own()
    base = load_base(BaseSpec(name=str(folder), weights=weights), "bf16", WINDOW)
    with torch.no_grad():
        loss = language_model_loss(base.model, ids_for(base.model, batch, WINDOW + 1)).item()
    loaded = peak()
    side = client_side(base, batch, WINDOW)
    step = timed(lambda number: side.train(Turn(number, number, number)), steps)
    values = sum(parameter.numel() for parameter in side.adapter.tensors().values())
    what = f"Coterie, {weights or 'bf16, as kept'}"
    most, upload = peak(), len(side.upload(FIRST).encode())
    return Row(what, imports, loaded, most, own.peak, values, step, loss, upload)


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


def peft(folder: Path, weights: Any, steps: int, threads: int, batch: int) -> Row:
    """PEFT, with a model and an optimiser as in its documentation."""
    del weights
    torch.set_num_threads(threads)
    imports, own = peak(), Own()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = ids_for(plain, batch, WINDOW + 1)
    with torch.no_grad():
        loss = plain(input_ids=ids, labels=ids).loss.item()
    loaded = peak()
    model, values, step = lora_training(plain, lambda model: model(input_ids=ids, labels=ids).loss)
    seconds = timed(lambda _: step(), steps)
    most = peak()
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        upload = sum(path.stat().st_size for path in Path(saved).iterdir())
    return Row("PEFT, bf16", imports, loaded, most, own.peak, values, seconds, loss, upload)


def train_model(folder: Path, base: str) -> None:
    """Train the adapter that answers in `coterie chat` for a step, on a text of a few words."""
    (folder / "ada.txt").write_text("The sea was calm, and no one knew which way ships go. " * 40)
    splits = dict.fromkeys(("train", "validation", "test"), "ada.txt")
    values = {
        "base": base,
        "rounds": 1,
        "data_root": str(folder),
        "clients": [{"name": "ada", **splits}],
        "training": {"steps": 1, "batch": 2},
        "evaluation": {"keep": "last"},
    }
    coterie.run(values, out=folder / "run")


def first_tokens(run: Path, threads: int) -> tuple[float, float]:
    """Return the seconds to a token from the start of `coterie chat`, and from a second question.

    An answer is one token long, so its line ends as soon as the token is generated.
    """
    command = [sys.executable, "-m", "coterie", "chat", str(run), "--client", "ada", "--tokens=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    seconds: list[float] = []
    began, pipe = time.perf_counter(), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        for question in ("Name a sea.", "Which lake is the deepest?"):
            chat.stdin.write(f"{question}\n")
            chat.stdin.flush()
            assert chat.stdout.readline(), "coterie chat has ended"
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    return seconds[0], seconds[1]


def measure_chat(options: argparse.Namespace, folder: Path) -> None:
    """Measure and show the seconds to the first token of `coterie chat`."""
    fresh(train_model, folder, options.base)
    waits = {threads: first_tokens(folder / "run", threads) for threads in (1, 2)}
    show(
        f"Seconds to the first token of coterie chat, {options.base}",
        ("threads", "from the start", "from a second question"),
        [[str(threads), *(f"{wait:.2f}" for wait in waits[threads])] for threads in waits],
    )
    write(options, seconds=waits)


def cells(row: Row, size: int, theirs: int | None) -> list[str]:
    return [
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
        f"{row.upload / 1e6:.2f}",
    ]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--weights", default="bf16,nf4", help="formats; bf16 is as kept")
    parser.add_argument("--without-peft", action="store_true", help="where its model does not fit")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, after a first")
    parser.add_argument(
        "--folder", type=Path, help="write the base here, or use that which is here"
    )
    parser.add_argument("--base", help="a built-in base, instead of random weights")
    parser.add_argument("--chat", action="store_true", help="measure `coterie chat` with --base")
    options = parser.parse_args()
    if options.chat and not options.base:
        parser.error("--chat needs --base")
    with TemporaryDirectory() as name:
        if options.chat:
            measure_chat(options, Path(name))
            return
        folder = options.folder or Path(name) / "base"
        if options.base:
            folder = Path(fresh(place, options.base, Path()))
        if not folder.exists():
            fresh(make_base, folder, options.shape)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        jobs = [(ours, None if w == "bf16" else w) for w in options.weights.split(",")]
        jobs += [] if options.without_peft else [(peft, None)]
        common = (options.steps, options.threads, options.batch)
        rows = [fresh(job, folder, weights, *common) for job, weights in jobs]
    theirs = next((row.trained for row in rows if row.what.startswith("PEFT")), None)
    show(
        f"A base of {options.base or options.shape}, {size / MIB:,.0f} MiB in bf16; "
        f"{options.batch} x {WINDOW} tokens",
        COLUMNS,
        [cells(row, size, theirs) for row in rows],
        "" if options.base else f"targets of the first row: {LOADING} x file, {TRAINING} x PEFT",
    )
    write(options, size=size, rows=rows)


if __name__ == "__main__":
    main()
