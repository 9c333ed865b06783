"""Servers that are killed at every point of a run, in as few deployments as possible."""

from collections import Counter

from looped import Killed, kill

from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, server


def run_until_killed(
    run: RunConfig,
    clients: dict[str, Worker],
    out: RunFolder,
    turns: int,
    killed: set[tuple[int, int]],
) -> bool:
    """Run a server until its next kill; return whether it reached the end of the run.

    Args:
        run: The run.
        clients: The workers of the deployment.
        out: The server's folder.
        turns: The number of turns that a restarted server completes.
        killed: The points of all kills: the complete turns, and the number of waits since then.
    """
    first, waits = out.turns() + turns if out.is_run else 0, Counter[int]()

    def wait(loop: Loop) -> None:
        waits[out.turns()] += 1
        point = out.turns(), waits[out.turns()]
        if point[0] >= first and loop.turns > 1 and point not in killed:
            killed.add(point)
            kill(loop)

    try:
        server(run, out.path, Loop(clients, dict.fromkeys(range(1, 1000), wait))).rounds()
    except Killed:
        return False
    return True
