"""Memory of the local engine: one base, and 1, 4 or 32 clients that share it.

GPT-2 (124M, random weights) and CoMiGS-1G1S at rank 8, a batch of 8 x 128 tokens, through the
public API: one round, with an update of the experts and one of the routers, a checkpoint, and
an evaluation before and after aggregation. Every run has a fresh process; its peak is that of the
whole process, from the first import on (Linux's ru_maxrss).

`--base tiny-gpt2 --rounds 3 --keep best` takes that base instead, for as many rounds, and has every
client keep its best model.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from common import MIB, fresh, gpt2, options_of, peak, recorded, save, show, write
from transformers.utils import logging

import coterie
from coterie.bases.precision import Precision
from coterie.messages.names import SECONDS
from coterie.runs import RunFolder
from coterie.seeding import generator

TARGETS = {4: 1.10, 32: 1.60}
"""Largest ratio to one client's peak, by the number of clients."""


@dataclass(frozen=True)
class Peak:
    """The peak memory of a run in bytes, by number of clients."""

    clients: int
    peak: int
    trained: int
    """One client's adapter."""
    optimiser: int
    """One client's moments."""
    seconds: float
    """The median round's."""


def make_base(folder: Path) -> None:
    """Save GPT-2's shape with random weights."""
    logging.disable_progress_bar()
    save(gpt2(), folder)


def make_texts(folder: Path, clients: int) -> list[dict[str, str]]:
    """Write a file of random words per client, and return the run's `clients`."""
    words = ["the", "sea", "was", "calm", "and", "no", "one", "knew", "which", "way", "ships"]
    clients_of_run = []
    for name in (f"client-{number:02d}" for number in range(clients)):
        chosen = torch.randint(len(words), (12_000,), generator=generator(0, "text", name))
        (folder / f"{name}.txt").write_text(" ".join(words[i] for i in chosen.tolist()))
        clients_of_run.append({"name": name, "path": f"{name}.txt"})
    return clients_of_run


def measure(
    folder: Path,
    clients: int,
    precision: Precision,
    threads: int,
    base: str,
    rounds: int,
    keep: str,
) -> Peak:
    """Run with so many clients; to be called once per process, as a peak never falls."""
    config = {
        "threads": threads,
        "base": base,
        "data_root": str(folder),
        "method": {
            "name": "comigs-1g1s",
            "mlp": {"rank": 8},
            "router": {"every": 1, "steps": 1},
        },
        "rounds": rounds,
        "clients": make_texts(folder, clients),
        "data": {"window": 128, "limits": {"test": 600}},
        "training": {"steps": 1, "batch": 8, "precision": precision},
        "evaluation": {"keep": keep},
    }
    run = coterie.run(config, out=folder / f"run-{clients}")
    most = peak()
    ended = RunFolder(run.path)
    seconds = median(recorded(ended, SECONDS))
    state = ended.load("client-client-00")
    tensors = (
        t for _, part in state.walk() for group in part.groups.values() for t in group.values()
    )
    trained = sum(tensor.nbytes for tensor in state["adapter"].values())
    moments = sum(tensor.nbytes for tensor in tensors) - trained
    return Peak(clients, most, trained, moments, seconds)


COLUMNS = (
    *("clients", "peak MiB", "x first", "target", "MiB per further client"),
    *("trained MiB", "optimiser MiB", "s/round"),
)


def cells(row: Peak, before: Peak | None, first: Peak) -> list[str]:
    return [
        str(row.clients),
        f"{row.peak / MIB:,.0f}",
        f"{row.peak / first.peak:.2f}",
        f"{TARGETS[row.clients]:.2f}" if row.clients in TARGETS else "",
        "" if before is None else f"{per_client(before, row):.2f}",
        f"{row.trained / MIB:.1f}",
        f"{row.optimiser / MIB:.1f}",
        f"{row.seconds:.2f}",
    ]


def per_client(fewer: Peak, more: Peak) -> float:
    """Return the MiB of each client by which one run has more than another."""
    return (more.peak - fewer.peak) / (more.clients - fewer.clients) / MIB


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--clients", default="1,4,32", help="numbers of clients; the first is 1 x")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--base", help="a base's name; default: GPT-2 with random weights")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", choices=["last", "best"], default="last")
    options = parser.parse_args()
    counts = [int(count) for count in options.clients.split(",")]
    with TemporaryDirectory() as name:
        folder = Path(name)
        # Not in this process: Linux counts a parent's peak as its children's.
        if options.base is None:
            fresh(make_base, folder / "base")
        base = options.base or "base"
        common = (options.precision, options.threads, base, options.rounds, options.keep)
        peaks = [fresh(measure, folder, count, *common) for count in counts]
    show(
        f"Peak memory of the local engine, {options.base or 'GPT-2 124M'}, 8 x 128 tokens, "
        f"{options.precision}",
        COLUMNS,
        [cells(row, b, peaks[0]) for b, row in zip([None, *peaks], peaks, strict=False)],
        "trained and optimiser: of each client",
    )
    write(options, runs=peaks, targets=TARGETS)


if __name__ == "__main__":
    main()
