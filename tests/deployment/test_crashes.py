"""Processes of a deployment that are killed with SIGKILL in every state of a committed table: when
they are started again, the run ends in the bits of a run in which no process was killed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from crashes.deployments import STATES, Outcome
from crashes.state import State
from ports import die_with_parent

SEEDS = 50
"""The number of seeds of each state."""
SHARD = 5
"""The number of seeds that one thorough test executes."""
TESTS = Path(__file__).parents[1]
Crash = Callable[[State, int], Outcome]


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crash]:
    """A function that kills a process in a state, and compares the run."""
    folder = tmp_path_factory.mktemp("crashes")
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        [sys.executable, "-m", "crashes", str(folder / "runs")],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def execute(state: State, seed: int) -> Outcome:
            print(STATES.index(state), seed, file=requests, flush=True)
            return Outcome(**json.loads(replies.readline()))

        yield execute
        requests.close()
        assert process.wait(30) == 0


def shards() -> list[Any]:
    """Return each state with the first seed, and with each range of seeds of a thorough test."""
    slow, thorough = pytest.mark.slow, pytest.mark.thorough
    first = [pytest.param(state, range(1), id=str(state), marks=slow) for state in STATES]
    return first + [
        pytest.param(s, range(n, n + SHARD), id=f"{s}, from seed {n}", marks=thorough)
        for s in STATES
        for n in range(0, SEEDS, SHARD)
    ]


@pytest.mark.parametrize(("state", "seeds"), shards())
def test_a_run_with_a_killed_process_ends_in_the_same_bits(state, seeds, crash: Crash) -> None:
    for seed in seeds:
        outcome = crash(state, seed)
        assert outcome.killed == (1 if state.first is None else 2), (seed, outcome)
        assert outcome.difference == "", (seed, outcome)
