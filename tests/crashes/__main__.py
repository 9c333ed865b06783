"""Execute deployments with killed processes, on request or for a table.

python -m crashes FOLDER             serve requests: for each line "NUMBER SEED" of the standard
                                     input, where NUMBER is the number of a state in `STATES`,
                                     write a line of JSON, an `Outcome`
python -m crashes FOLDER 50          execute 50 seeds of all states, and print a table
python -m crashes FOLDER 50 0 2      the same for every second state, from the first on
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from crashes.deployments import STATES, Stage, shorten_times


def print_row(stage: Stage, number: int, seeds: int) -> None:
    """Execute the seeds of a state; print a row of the table, and the runs that differ."""
    outcomes = [stage.outcome(number, seed) for seed in range(seeds)]
    for seed, outcome in enumerate(outcomes):
        if outcome.difference:
            print(f"{STATES[number]}, seed {seed}: {outcome.difference}", *outcome.notes, sep="\n")
    cells = [
        STATES[number],
        sum(outcome.killed for outcome in outcomes),
        sum(not outcome.difference for outcome in outcomes),
        f"{sum(outcome.seconds for outcome in outcomes):.0f}",
        f"{sum(outcome.cpu for outcome in outcomes):.0f}",
    ]
    print("|", *(f"{cell} |" for cell in cells), flush=True)


def main() -> None:
    """Serve requests, or print a table."""
    torch.set_num_threads(1)
    shorten_times()
    stage = Stage(Path(sys.argv[1]).resolve())
    if len(sys.argv) == 2:
        print("ready", flush=True)
        for line in sys.stdin:
            number, seed = map(int, line.split())
            print(json.dumps(asdict(stage.outcome(number, seed))), flush=True)
        return
    seeds, start, step = map(int, (*sys.argv[2:], 0, 1)[:3])
    for number in range(start, len(STATES), step):
        print_row(stage, number, seeds)


if __name__ == "__main__":
    main()
