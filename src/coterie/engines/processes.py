"""Runs that are completed in processes of their own, beside the work of the caller."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from threading import Lock

from coterie.errors import CoterieError


@contextmanager
def completing(
    runs: Sequence[Path],
    processes: int,
    plugins: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[None]:
    """Complete runs in other processes while the `with` block is executed.

    Each process executes `coterie run --resume`. At the end of the block, the caller waits for all
    processes. If the block fails or is interrupted, the processes are stopped; their runs can be
    resumed.

    Args:
        runs: The folders of the runs.
        processes: The maximum number of processes at any time.
        plugins: The plugins that the runs use.
        report: Function that is called with each line of a run's progress, in another thread.

    Raises:
        CoterieError: A run failed.
    """
    others = _Processes(plugins, report)
    with ThreadPoolExecutor(processes) as threads:
        futures = [threads.submit(others.complete, run) for run in runs]
        try:
            yield
            for future in futures:
                future.result()
        except BaseException:
            others.stop()
            raise


class _Processes:
    """The processes that complete runs."""

    def __init__(self, plugins: Sequence[str], report: Callable[[str], None]) -> None:
        self.options = [part for plugin in plugins for part in ("--plugin", plugin)]
        self.report = report
        self.running: set[Popen[str]] = set()
        self.stopped = False
        self._lock = Lock()

    def complete(self, run: Path) -> None:
        """Complete a run in another process; do nothing if `stop` has been called.

        Raises:
            CoterieError: The process failed.
        """
        command = [sys.executable, "-m", "coterie", "run", "--resume", str(run), *self.options]
        with self._lock:
            if self.stopped:
                return
            process = Popen(command, stdout=PIPE, stderr=STDOUT, text=True)
            self.running.add(process)
        lines = [""]
        with process:
            assert process.stdout is not None
            for line in map(str.rstrip, process.stdout):
                lines.append(line)
                if line.startswith(f"{run.name}: "):
                    self.report(line)
        with self._lock:
            self.running.remove(process)
        if process.returncode and not self.stopped:
            raise CoterieError(f"The baseline {run.name} failed: {lines[-1]}")

    def stop(self) -> None:
        """Stop all processes, and start no others."""
        with self._lock:
            self.stopped = True
            for process in self.running:
                process.terminate()
