"""Execute deployments with killed processes, and compare them with undisturbed runs.

python -m crashes FOLDER      for each line "NUMBER SEED" of the standard input, where NUMBER is
                              the number of a state in `STATES`, write a line of JSON, an `Outcome`
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from crashes.deployments import Stage, shorten_times

if __name__ == "__main__":
    torch.set_num_threads(1)
    shorten_times()
    stage = Stage(Path(sys.argv[1]).resolve())
    for line in sys.stdin:
        number, seed = map(int, line.split())
        print(json.dumps(asdict(stage.outcome(number, seed))), flush=True)
