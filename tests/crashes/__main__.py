"""Execute deployments with killed processes, and summarise their outcomes.

python -m crashes run FOLDER       for each line "NUMBER SEED" of the standard input, where
                                   NUMBER is the number of a state in `STATES`, write a line of
                                   JSON, an `Outcome`
python -m crashes list SEEDS       write the lines of all states with the seeds below SEEDS
python -m crashes table FILES      print tables of the outcomes in files: runs, kills, runs with
                                       the same bits, and mean seconds and CPU seconds of a run
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from crashes.deployments import GROUPS, STATES, Outcome, Stage, shorten_times


def run(folder: Path) -> None:
    """Execute the deployments that the standard input requests."""
    torch.set_num_threads(1)
    shorten_times()
    stage = Stage(folder)
    for line in sys.stdin:
        number, seed = map(int, line.split())
        print(json.dumps(asdict(stage.outcome(number, seed))), flush=True)


def list_all(seeds: int) -> None:
    """Write a request for each state and seed."""
    for seed in range(seeds):
        for number in range(len(STATES)):
            print(number, seed)


def print_table(files: list[str]) -> None:
    """Print a table of the outcomes of each state, and one of the outcomes of each phase."""
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    for state in STATES:
        print_row([str(state)], [o for o in outcomes if STATES[o.state] is state])
    for (side, phase), states in GROUPS.items():
        cells = [side, phase, str(len(states))]
        print_row(cells, [o for o in outcomes if STATES[o.state] in states])
    print_row(["all", "", str(len(STATES))], outcomes)
    for outcome in outcomes:
        if outcome.difference:
            print(STATES[outcome.state], outcome)


def print_row(cells: list[str], outcomes: list[Outcome]) -> None:
    """Print the numbers of runs, kills and runs with the same bits, and the mean CPU seconds."""
    killed = sum(outcome.killed for outcome in outcomes)
    same = sum(not outcome.difference for outcome in outcomes)
    cpu = sum(outcome.cpu for outcome in outcomes) / max(1, len(outcomes))
    seconds = sum(outcome.seconds for outcome in outcomes) / max(1, len(outcomes))
    figures = [str(len(outcomes)), str(killed), str(same), f"{seconds:.1f}", f"{cpu:.1f}"]
    print("|", " | ".join(cells + figures), "|")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", folder]:
            run(Path(folder).resolve())
        case ["list", seeds]:
            list_all(int(seeds))
        case ["table", *files]:
            print_table(files)
        case _:
            sys.exit(__doc__)
