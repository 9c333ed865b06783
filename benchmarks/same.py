"""Whether two commits give the same results: every method in every engine, bit for bit.

Each commit is checked out in a temporary git worktree. With both, one after the other, runs of
seconds are carried out from the same run files, and their run folders are compared: the states of
the newest checkpoint, the figures of metrics.jsonl, result.json and the scores; times are not. Of
the server's states, the tensors are compared without their names. The exit code is 1 if anything
differs, and the run folders are then kept.

Engines: local; ray (which takes long to start, so one method of each family unless --methods is
given); deployment (a server and clients in one process); faults (the same, with a client that joins
late, a lost reply, and a server that is killed during an exchange, which is then repeated);
processes (a real server and real clients, with two methods).

The local engine and `faults` also run methods with each built-in transform, with tight bounds, with
token weights, and with each server optimiser.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path(__file__).with_name("same_runs.py")
ENGINES = ("local", "ray", "deployment", "faults", "processes")
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg + median": {"transforms": ["median"]},
    "comigs-1g1s + trimmed_mean": {"transforms": ["trimmed_mean"]},
    "comigs-1g1s + tokens": {"weights": "tokens"},
    "fedavg + bounds": {"largest_change": 1.0},
    "pcl-2 + bounds": {"largest_change": 1.0},
    "grouped + bounds": {"largest_change": 1.0},
    "fedavg + tokens + bounds": {"weights": "tokens", "largest_change": 1.0, "largest_weight": 1.0},
    "comigs-1g1s + fedavgm": {"optimiser": "fedavgm"},
    "fedavg + fedadam": {"optimiser": "fedadam"},
    "fedavg + fedyogi": {"optimiser": "fedyogi"},
    "fedavg + fedadagrad": {"optimiser": "fedadagrad"},
}
"""The section `aggregation` of further runs. A name begins with the name of the method."""
IN_PROCESSES = ("fedavg", "comigs-1g1s")
"""Methods of the engine `processes`, unless --methods is given."""
SHOWN = 5
"""Differences of a run that are printed."""
NEEDS = {"ray": ("ray",), "processes": ("aiohttp",)}
"""Packages that an engine needs beyond Coterie's own."""


@dataclass(frozen=True)
class Row:
    """One method in one engine."""

    method: str
    engine: str
    differences: list[str]
    seconds: tuple[float, float]
    """Seconds that the run took, with the old commit and with the new one."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="the commit to compare with it")
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument(
        "--methods", help="names in tests/every_method.py, separated by semicolons; default: all"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run folders in any case")
    options = parser.parse_args()
    began = time.monotonic()
    engines = options.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    folder = Path(mkdtemp(prefix="coterie-same-"))
    commits = [git("rev-parse", "--short", commit) for commit in (options.old, options.new)]
    methods = write_run_files(folder / "inputs", options.methods)
    print("Commits: old {}, new {}".format(*commits), flush=True)
    compared = different = 0
    with checkouts(folder, commits) as (old, new):
        for engine in engines:
            missing = [name for name in NEEDS.get(engine, ()) if not importlib.util.find_spec(name)]
            if missing:
                print(f"{engine}: skipped, because {' and '.join(missing)} is not installed")
                continue
            rows = compare(folder, engine, methods[engine], old, new)
            show(rows)
            compared += len(rows)
            different += sum(bool(row.differences) for row in rows)
    if different or options.keep:
        print(f"The run folders are in {folder}.")
    else:
        shutil.rmtree(folder)
    minutes = (time.monotonic() - began) / 60
    print(f"Of {compared} runs, {different} differ ({minutes:.1f} minutes).")
    sys.exit(different > 0 or not compared)


def write_run_files(folder: Path, chosen: str | None) -> dict[str, list[str]]:
    """Write run files of all methods with their bases and texts; return what each engine runs."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    from every_method import FEW, METHODS

    from coterie.methods.fedmkt.method import FedMKT
    from coterie.methods.registry import available
    from coterie.testing.small import (
        small_values,
        teaching_values,
        write_base,
        write_other_base,
        write_questions,
        write_texts,
    )

    folder.mkdir()
    base, texts = write_base(folder / "base"), write_texts(folder)
    other = write_other_base(folder / "other", texts / "poet.txt")
    questions = write_questions(folder)
    for name in (*METHODS, *VARIANTS):
        method = METHODS[name.partition(" + ")[0]]
        if issubclass(available()[method["name"]], FedMKT):
            values = teaching_values(base, other, questions, method=method)
        else:
            values = small_values(base, texts, method=method, rounds=2)
            values["data"] = {**values["data"], "public": "poet.txt"}
        values["evaluation"] = {"every": 1}
        values["aggregation"] = VARIANTS.get(name, {})
        values["deployment"] = {"quorum": len(values["clients"]) - 1}
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    if chosen is not None:
        names, every = chosen.split(";"), [*METHODS, *VARIANTS]
        if unknown := set(names) - set(every):
            sys.exit(f"No such method: {', '.join(sorted(unknown))}; there are {every}.")
        return dict.fromkeys(ENGINES, names)
    few = [name for name in METHODS if name in FEW]
    by_engine = {"ray": few, "processes": list(IN_PROCESSES)}
    by_engine |= {"local": [*METHODS, *VARIANTS], "faults": [*METHODS, *VARIANTS]}
    return {engine: by_engine.get(engine, list(METHODS)) for engine in ENGINES}


@contextmanager
def checkouts(folder: Path, commits: list[str]) -> Iterator[list[Path]]:
    """Check out commits in worktrees, which are removed after the block."""
    made: list[Path] = []
    try:
        for commit, name in zip(commits, ("old", "new"), strict=True):
            git("worktree", "add", "--quiet", "--detach", str(folder / name), commit)
            made.append(folder / name)
        yield made
    finally:
        for path in made:
            git("worktree", "remove", "--force", str(path))


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def compare(folder: Path, engine: str, names: list[str], old: Path, new: Path) -> list[Row]:
    """Run the same files with two checkouts, and return the differences."""
    outs = [folder / f"{engine}-{checkout.name}" for checkout in (old, new)]
    earlier, later = (
        carry_out(checkout, engine, folder / "inputs", out, names)
        for checkout, out in zip((old, new), outs, strict=True)
    )
    rows: list[Row] = []
    for name in names:
        first, second = earlier.get(name, UNFINISHED), later.get(name, UNFINISHED)
        errors = [line["error"] for line in (first, second)]
        differing = [f"{which}: {e}" for which, e in zip(("old", "new"), errors, strict=True) if e]
        if not differing:
            differing = differences(contents(outs[0] / name), contents(outs[1] / name))
        rows.append(Row(name, engine, differing, (first["seconds"], second["seconds"])))
    return rows


UNFINISHED = {"seconds": 0.0, "error": "the process ended before this run; see log.txt"}


def carry_out(
    checkout: Path, engine: str, inputs: Path, out: Path, names: list[str]
) -> dict[str, dict[str, Any]]:
    """Run files with the code of a checkout, and return the line of runs.jsonl of each."""
    out.mkdir()
    paths = os.pathsep.join([str(checkout / "src"), str(checkout)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-P", str(RUNS), str(checkout), engine, str(inputs), str(out)]
    with (out / "log.txt").open("wb") as log:
        subprocess.run(
            [*command, *names], cwd=out, env=environment, stdout=log, stderr=log, check=False
        )
    done = out / "runs.jsonl"
    if not done.exists():
        sys.exit(f"No run of the engine {engine} was carried out; see {out / 'log.txt'}.")
    lines = map(json.loads, done.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines}


def contents(folder: Path) -> dict[str, Any]:
    """Read all results of the run folders in a folder, by file, less what tells the time."""
    contents_by_path: dict[str, Any] = {}
    for description in sorted(folder.rglob("run.json")):
        run = description.parent
        name = str(run.relative_to(folder))
        name = re.sub(r"-[0-9a-f]{16}$", "", name)  # a deployed run has a random number
        files = [run / "result.json", run / "metrics.jsonl", *run.glob("scores/*/*.json")]
        checkpoints = sorted((run / "checkpoints").glob("[0-9]*"))
        states = sorted(checkpoints[-1].glob("*.safetensors")) if checkpoints else []
        of_server = [file for file in states if file.stem.startswith(("server", "transforms"))]
        if of_server:
            contents_by_path[f"{name}/server"] = without_names(map(read, of_server))
        files += [file for file in states if file not in of_server]
        for file in filter(Path.exists, files):
            contents_by_path[f"{name}/{file.relative_to(run)}"] = read(file)
    return contents_by_path


def read(file: Path) -> Any:
    """Read a file as values that can be compared."""
    match file.suffix:
        case ".safetensors":
            return tensors(file.read_bytes())
        case ".jsonl":
            lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
            kept = (line for line in lines if "seconds" not in line["name"])
            counts = Counter(json.dumps(line, sort_keys=True) for line in kept)
            return {line: {"times": count} for line, count in counts.items()}
        case _:
            return timeless(json.loads(file.read_text(encoding="utf-8")))


def tensors(data: bytes) -> dict[str, Any]:
    """Return tensors' types, shapes and bytes by name, and the header's values by key."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    written = json.loads(header.pop("__metadata__", {}).get("coterie", "{}"))
    entries = {f"header: {key}": value for key, value in written.items() if key != "coterie"}
    for name, tensor in header.items():
        begin, end = (8 + size + offset for offset in tensor["data_offsets"])
        entries[name] = (tensor["dtype"], tuple(tensor["shape"]), data[begin:end])
    return entries


def without_names(files: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how often each tensor occurs in a server's files; the code may change the names."""
    contents = chain.from_iterable(file.items() for file in files)
    counts = Counter(item for name, item in contents if not name.startswith("header: "))
    return {f"{dtype} {shape} {data!r}": n for (dtype, shape, data), n in counts.items()}


def timeless(value: Any) -> Any:
    """Return JSON without keys of seconds, however deep."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if "seconds" not in key}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each file that is not the same in both; a run without files is one, too."""
    lines = [] if old or new else ["neither has written a run folder"]
    for file in sorted(old.keys() | new.keys()):
        if file not in new or file not in old:
            lines.append(f"{file} is missing in {'old' if file in new else 'new'}")
        elif old[file] != new[file]:
            lines.append(f"{file}: {difference(old[file], new[file])}")
    return lines


def difference(old: Any, new: Any) -> str:
    """Return what differs in two files: how many entries, and the first of them."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return "differs"
    names = sorted(k for k in old.keys() | new.keys() if old.get(k, ...) != new.get(k, ...))
    every = len(old.keys() | new.keys())
    return f"{len(names)} of {every} entries differ, the first is {names[0][:100]}"


def show(rows: list[Row]) -> None:
    """Print a line for each run, and one for each difference."""
    print(f"{'method':<28}{'engine':<14}{'result':<12}{'s, old':>8}{'s, new':>8}")
    for row in rows:
        times = "".join(f"{seconds:>8.1f}" for seconds in row.seconds)
        result = "DIFFERENT" if row.differences else "same"
        print(f"{row.method:<28}{row.engine:<14}{result:<12}{times}")
        for line in row.differences[:SHOWN]:
            print(f"    {line}")
        if more := len(row.differences[SHOWN:]):
            print(f"    and {more} more")
    print(flush=True)


if __name__ == "__main__":
    main()
