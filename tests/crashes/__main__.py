"""Execute deployments with killed processes, and summarise their outcomes.

python -m crashes run FOLDER       for each line "NUMBER SEED" of the standard input, where
                                   NUMBER is the number of a state in `STATES`, write a line of
                                   JSON, an `Outcome`
python -m crashes list SEEDS       write the lines of all states with the seeds below SEEDS
python -m crashes table FILES      print a table of the outcomes in files
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from crashes.deployments import STATES, Outcome, Stage, shorten_times


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
    """Print, for each state, how many processes were killed, and how many runs ended the same."""
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    for number, state in enumerate(STATES):
        mine = [outcome for outcome in outcomes if outcome.state == number]
        killed = sum(outcome.killed for outcome in mine)
        same = sum(not outcome.difference for outcome in mine)
        seconds = sum(outcome.seconds for outcome in mine)
        cpu = sum(outcome.cpu for outcome in mine)
        print(f"| {state} | {len(mine)} | {killed} | {same} | {seconds:.0f} | {cpu:.0f} |")
    for outcome in outcomes:
        if outcome.difference:
            print(STATES[outcome.state], outcome)


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
