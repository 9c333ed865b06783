"""The cost of a round, by method: FedAMoLE's table 4 (arXiv 2411.19128), and its table 2 in part.

Each row is a process of its own: one round of ten clients, as the paper has them, on random
questions with one of three answers. Memory is the process's peak (Linux's ru_maxrss), or the
largest allocation on a GPU. Megabytes are 2^20 bytes, as the paper's are; those sent are of real
messages, which hold fp32 values, and the mean over clients. Seconds are per client: training;
aggregation with all that is neither of the others, such as messages, FedAMoLE's embeddings and
the assignment of experts (of the whole round, not per client); and scoring, with FDLoRA's search
of weights. `bf16` is an upload's values on Llama-3.2-1B's shape, at two bytes each.

    python benchmarks/round_cost.py                     # on an embedded base
    python benchmarks/round_cost.py --base llama-1b     # random weights of that shape, 2.5 GB
    python benchmarks/round_cost.py --base moe          # table 2: a mixture of experts

Table 2's Switch Transformer is an encoder-decoder, and Coterie's bases are causal. `moe` stands for
it: Mixtral with Switch-base's width, heads and eight experts, and as many blocks as its encoder and
decoder have. It has 48 query and value layers; Switch, with cross-attention, 72.
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from common import MIB, fresh, llama, make_base, options_of, peak, save, show, write
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.utils import logging

from coterie.config.run import parse
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.exchanges.exchange import Exchange
from coterie.federation.pipeline import pipeline_of
from coterie.messages import Message
from coterie.messages.names import BYTES_DOWN, BYTES_UP
from coterie.methods.contract import ServerContext
from coterie.runs import RunFolder

CLIENTS = 10
WORDS = ["the", "sea", "was", "calm", "and", "no", "one", "knew", "which", "way", "ships", "go"]
FIGURES = tuple[float | None, ...]
"""The paper's: MB of memory, up and down; seconds of training, aggregation and testing."""
LLAMA: dict[str, tuple[dict[str, Any], FIGURES]] = {
    "FedIT-FT": ({"name": "fedit"}, (2782.11, 1.64, 1.64, 4.85, 0.02, 2.37)),
    "FedPrompt-FT": (
        {"name": "fedprompt", "virtual_tokens": 38, "init_text": None},
        (2827.18, 0.29, 0.29, 4.47, 0.00, 3.20),
    ),
    "FedPTuning-FT": (
        {"name": "fedptuning", "encoder_hidden_size": 1024},
        (2841.88, 0.16, 0.16, 4.19, 0.00, 2.99),
    ),
    "FDLoRA": ({"name": "fdlora"}, (2775.86, 1.64, 1.64, 4.14, 0.03, 2.60)),
    "FedAMoLE, 15 experts": ({"experts": 15}, (2788.95, 7.59, 7.59, 13.25, 4.97, 4.92)),
    "FedAMoLE, 20 experts": ({"experts": 20}, (2792.07, 9.24, 9.23, 14.44, 5.20, 5.20)),
    "FedAMoLE, 25 experts": ({"experts": 25}, (2812.88, 10.88, 10.87, 15.57, 5.49, 5.63)),
    "FedAMoLE, 30 experts": ({"experts": 30}, (2797.96, 12.52, 12.51, 16.49, 5.85, 5.72)),
}
"""Table 4."""
SWITCH: dict[str, tuple[dict[str, Any], FIGURES]] = {
    "FedAMoLE, 30 experts": ({"experts": 30}, (7.99 * 1024, 25.66, 25.63, None, None, None)),
}
"""Table 2; FedMoE has 13.89 GB, and 1,850 MB each way."""


@dataclass
class Clock:
    """Seconds by kind of work; work inside other work counts once."""

    seconds: dict[str, float] = field(default_factory=dict)
    inside: float = 0.0

    def time(self, owner: Any, name: str, kind: str) -> None:
        """Count what a method of an object takes."""
        work = getattr(owner, name)

        @wraps(work)
        def timed(*arguments: Any, **options: Any) -> Any:
            before, self.inside = self.inside, 0.0
            began = now()
            try:
                return work(*arguments, **options)
            finally:
                took = now() - began
                self.seconds[kind] = self.seconds.get(kind, 0.0) + took - self.inside
                self.inside = before + took

        setattr(owner, name, timed)


def now() -> float:
    """Return the time in seconds, after all work on a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make(folder: Path, name: str) -> str:
    """Return the name of an embedded base, or the folder of a new base with random weights."""
    if name == "llama-1b":
        make_base(folder, "1b")
        return str(folder)
    if name == "moe":
        config = MixtralConfig(
            vocab_size=32128,
            hidden_size=768,
            num_hidden_layers=24,
            intermediate_size=3072,
            num_attention_heads=12,
            num_key_value_heads=12,
            num_local_experts=8,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
            dtype="bfloat16",
        )
        save(AutoModelForCausalLM.from_config(config), folder)
        return str(folder)
    return name


def make_questions(folder: Path, samples: int) -> list[dict[str, str]]:
    """Write a file of questions per client, and return the run's `clients`."""
    entries = []
    for client in range(CLIENTS):
        with (folder / f"client-{client}.jsonl").open("w", encoding="utf-8") as file:
            for n in range(samples):
                words = [WORDS[(7 * n + 3 * i * (client + 1)) % len(WORDS)] for i in range(30)]
                record = {"instruction": " ".join(words), "output": ["Yes", "No", "Maybe"][n % 3]}
                file.write(json.dumps(record) + "\n")
        entries.append({"name": f"client-{client}", "path": f"client-{client}.jsonl"})
    return entries


def run_of(base: str, folder: Path, method: dict[str, Any], args: argparse.Namespace) -> Any:
    """Return the settings of a run of one round."""
    samples = args.tests * 10
    return {
        "base": base,
        "data_root": str(folder),
        "clients": make_questions(folder, samples),
        "method": {"name": "fedamole", **method},
        "rounds": 1,
        "device": args.device,
        "data": {
            "window": 128,
            "instructions": {"template": "plain", "choices": ["Yes", "No", "Maybe"]},
        },
        "training": {"batch": 1, "steps": args.steps},
        "evaluation": {"keep": "last"},
    }


def measured(run: dict[str, Any], out: Path) -> list[float]:
    """Return the seven figures of the last exchange; FDLoRA's first one trains clients alone."""
    config = parse(run)
    session = Session(config)
    participants = session.federation(config)
    out.mkdir()
    rounds = local_run(config, session.base, participants.clients, RunFolder(out))
    clock = Clock()
    for host in map(rounds.clients.host, rounds.names):
        clock.time(host.side, "train", "train")
        clock.time(host, "score_trained", "test")
        for name, kind in (("_means", "rest"), ("_fuse", "test")):
            if hasattr(host.side, name):
                clock.time(host.side, name, kind)
    clock.time(rounds, "step", "rest")
    for turn in map(config.turn, range(config.turns)):
        clock.seconds = {}
        rounds.step(turn, rounds.names)
    lines = rounds.recorder.take()
    sent = [
        fmean([line["value"] for line in lines if line["name"] == way][-CLIENTS:]) / MIB
        for way in (BYTES_UP, BYTES_DOWN)
    ]
    each = [clock.seconds[kind] / CLIENTS for kind in ("train", "test")]
    on_gpu = session.base.device.type == "cuda"
    most = torch.cuda.max_memory_allocated() if on_gpu else peak()
    shape = by_shape(run["method"])
    return [most / MIB, *sent, each[0], clock.seconds["rest"], each[1], shape]


def by_shape(method: dict[str, Any]) -> float:
    """Return the MB of an upload's values on Llama-3.2-1B's shape in bf16, mean over clients."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(llama("1b"))
    names = [f"client-{n}" for n in range(CLIENTS)]
    run = parse({"clients": [{"name": n, "path": n} for n in names], "method": method})
    server = run.method.server(
        ServerContext(0, base, tuple(names), lambda name, value: None, run.training)
    )
    value = server.initial()
    shapes = {name: list(tensor.shape) for name, tensor in value.adapter.items()}
    for name in names:
        value = server.join(value, name, Message(0, {}, {"shapes": shapes}))
    exchange = Exchange(Path(gettempdir()), pipeline_of(run), run.method.schema(), run.aggregation)
    exchange.open(run.turn(0), names)
    groups = [g for name in names for g in server.expects(value, name, exchange).values()]
    return sum(prod(shape) for shapes in groups for shape in shapes.values()) * 2 / CLIENTS / MIB


def cell(ours: float, paper: float | None) -> str:
    """Return a figure, with the paper's figure beside it."""
    return f"{ours:,.2f}" if paper is None else f"{ours:,.2f} ({paper:,.2f})"


def main() -> None:
    """Print the table."""
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--base", default="tiny-gpt2", help="an embedded base, llama-1b or moe")
    parser.add_argument("--steps", type=int, default=10, help="of each client (paper: 200)")
    parser.add_argument("--tests", type=int, default=20, help="test samples of each client")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--methods", nargs="*", help="only these rows")
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows = SWITCH if args.base == "moe" else LLAMA
    columns = ("memory", "up", "down", "train s", "aggregate s", "test s", "up, bf16")
    table, figures = [], {}
    with TemporaryDirectory() as place:
        base = fresh(make, Path(place) / "base", args.base)
        for name, (method, paper) in rows.items():
            if args.methods and name not in args.methods:
                continue
            run = run_of(base, Path(place), method, args)
            figures[name] = fresh(measured, run, Path(place) / f"run of {name}")
            table.append([name, *map(cell, figures[name], (*paper, None))])
    show("MB and seconds (the paper's)", ("method", *columns), table)
    write(args, columns=columns, rows=figures)


if __name__ == "__main__":
    main()
