"""Rounds per minute with clients in one process, in one worker of Ray, and in several workers.

32 clients share the demo's texts and tiny-gpt2. This process and all workers run on as many cores
as there are workers at most; every process computes with one thread. The engines take turns, so
that other load on the machine affects all of them. The first round of each run, in which workers
load the base, and the last, in which models are scored, are left out.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from common import options_of, recorded, show, write

import coterie
from coterie.bases import EMBEDDED
from coterie.engines.cluster import set_variables
from coterie.messages.names import SECONDS
from coterie.runs import RunFolder


@dataclass(frozen=True)
class Speed:
    """One engine's rounds; seconds are of each round but the first and the last of each run."""

    engine: str
    workers: int
    seconds: list[float]

    @property
    def per_minute(self) -> float:
        """Rounds per minute."""
        return 60 / median(self.seconds)


def main() -> None:
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--workers", type=int, default=2, help="most workers, and cores")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="training steps per round")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.workers :])
    load = os.getloadavg()[0]
    contestants = [("local", 1), *(("ray", count) for count in (1, options.workers))]
    seconds: dict[tuple[str, int], list[float]] = {each: [] for each in contestants}
    with TemporaryDirectory() as folder:
        values = run_file(Path(folder), options.clients, options.rounds, options.steps)
        for turn in range(options.turns):
            for engine, count in contestants:
                out = Path(folder, f"{engine}-{count}-{turn}")
                seconds[engine, count] += timed(values, out, engine, count)
    speeds = [Speed(*contestant, times) for contestant, times in seconds.items()]
    base = speeds[0].per_minute
    rows = [
        [s.engine, str(s.workers), f"{s.per_minute:.2f}", f"{s.per_minute / base:.2f}"]
        for s in speeds
    ]
    caption = f"{options.clients} clients, {options.workers} cores; load at the start {load:.1f}"
    show("Rounds per minute", ["engine", "processes", "rounds/min", "ratio"], rows, caption)
    write(options, speeds=speeds, load=load)


def run_file(folder: Path, clients: int, rounds: int, steps: int) -> dict[str, Any]:
    """Write each client's text; return the run."""
    texts = [path.read_text() for path in sorted((EMBEDDED / "demo-writers").glob("*.txt"))]
    listed: list[dict[str, str]] = []
    for number in range(clients):
        part, text = divmod(number, len(texts))
        length = len(texts[text]) // (-(-clients // len(texts)))
        file = folder / f"{number}.txt"
        file.write_text(texts[text][part * length : (part + 1) * length])
        listed.append({"name": f"c{number:03}", "path": str(file)})
    return {
        "method": "fedavg",
        "base": "tiny-gpt2",
        "rounds": rounds,
        "threads": 1,
        "training": {"steps": steps, "batch": 2},
        "evaluation": {"keep": "last"},
        "data": {"limits": {"test": 1000}},
        "clients": listed,
    }


def timed(values: dict[str, Any], out: Path, engine: Any, workers: int) -> list[float]:
    """Carry out a run; return the seconds of each round but the first and the last (scored)."""
    if engine == "local":
        coterie.run(values, out=out)
    else:
        set_variables(None)
        with patch("coterie.engines.ray.processors", lambda: workers):
            coterie.run(values, out=out, engine=engine)
    return recorded(RunFolder(out), SECONDS)[1:-1]


if __name__ == "__main__":
    main()
