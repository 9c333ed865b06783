"""Scores of a run's models on tasks of lm-eval: how to compute them, and tables of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coterie.analysis.experiments import ReportedRun
from coterie.analysis.frame import Result
from coterie.analysis.tables import Table, shown_of
from coterie.errors import CoterieError
from coterie.federation.participants import EVERYONE
from coterie.files import path_part, refuse_links, write_json, writing
from coterie.inference.finished import tokenizer
from coterie.inference.harness import Harness
from coterie.inference.models import BASE, RunModels, Step
from coterie.methods.contract import SERVER
from coterie.runs import RunFolder
from coterie.runs.read import TaskScores, read_json

FOLDER = "evaluations"
"""The subfolder of a run folder that contains the scores."""
UNTRAINED = "pretrained"
"""The method whose model is the base."""
Stored = Mapping[str, Any]
"""The content of a file in FOLDER; see `TaskScores`."""


def evaluate(
    run: str | Path,
    clients: Sequence[str],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    step: Step = lambda *_: None,
) -> list[Table]:
    """Score the base and the models of some clients on tasks of lm-eval.

    The models are the clients' models of the run's method and of the baselines. Equal models are
    scored once. The scores are written to the run folder, and are not computed again.

    Args:
        run: The run folder.
        clients: The names of the clients.
        tasks: Names of tasks or groups of tasks that lm-eval defines, and paths of YAML files.
        limit: The number of samples of each task; by default, all samples.
        step: Function that is called before each model is loaded. Its arguments are the name of the
            model, the number of models loaded so far, and the number of all models.

    Returns:
        A table for each client, with all scores in the run folder; see `tables`.

    Raises:
        CoterieError: The run is not finished or has no such client, lm-eval is not installed, or a
            task cannot be loaded.
    """
    models, folder = RunModels(Path(run)), RunFolder(Path(run))
    models.check(clients)
    if not clients or not tasks or (limit is not None and limit < 1):
        raise CoterieError("Give at least one client, one task, and one sample of each task.")
    harness, chat = Harness(tasks), models.config.data.chats
    with folder.lock():
        known = {_key(each["key"]): each["scores"] for each in _stored(folder.path)}
        for method, client, _, model, digest in models.attached(clients, step):
            for name in harness.names:
                key = {"model": digest, "task": name, "file": harness.digest(name), "limit": limit}
                if _key(key) not in known:
                    read = tokenizer(folder.path, client)
                    known[_key(key)] = harness.scores(name, model, read, limit, chat)
                named = {"method": method, "task": name, "lm_eval": version("lm-eval")}
                for owner in clients if client == EVERYONE else [client]:
                    _write(folder.path, {"client": owner, **named, "key": key}, known[_key(key)])
    return tables(ReportedRun.read(folder), clients)


def _key(key: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(key.items()))


def _write(path: Path, values: Mapping[str, Any], scores: Sequence[Mapping[str, Any]]) -> None:
    """Write the scores of a model on a task to the run folder at `path`."""
    client, method, task = (_component(values[part]) for part in ("client", "method", "task"))
    file = Path(FOLDER, client, method, f"{task}.json")
    refuse_links(path, file.parent)
    with writing(path / file):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
    write_json(path / file, {**values, "scores": scores})


def _component(name: str) -> str:
    """Return a path component that no other name has; a hash replaces forbidden characters."""
    part = path_part(name)
    return part if part == name else f"{part}-{blake2b(name.encode(), digest_size=4).hexdigest()}"


def _stored(path: Path) -> Iterator[Stored]:
    """Yield the contents of all files of scores in the run folder at `path`."""
    for file in sorted(path.glob(f"{FOLDER}/*/*/*.json")):
        yield read_json(path, str(file.relative_to(path)), TaskScores)


def tables(run: ReportedRun, clients: Sequence[str] = ()) -> list[Table]:
    """Return the scores in a run folder as tables, one for each client.

    The first row is the client's score on its own test text, from result.json. The score of the
    base is known only if `pretrained` is a baseline of the run.

    Args:
        run: The run.
        clients: The names of the clients; by default, all clients that have scores.

    Returns:
        Tables with a row per task and metric, and a column per method. Each cell after the base's
        contains the difference from the base in brackets.
    """
    results = _results(run)
    by_client: dict[str, list[Stored]] = {}
    for each in _stored(run.path):
        if each["method"] in results:
            by_client.setdefault(each["client"], []).append(each)
    chosen = [client for client in by_client if not clients or client in clients]
    return [_table(run, client, by_client[client], results) for client in chosen]


def _results(run: ReportedRun) -> dict[str, Result]:
    """Return the results of the base, of the baselines, and of the run, in this order.

    The result of the base is empty if `pretrained` is not among the methods.
    """
    folders = {name: run.path / "baselines" / name for name in run.config.get("baselines", ())}
    results: dict[str, Result] = {BASE: {}}
    for name, path in {**folders, run.method: run.path}.items():
        results[BASE if name == UNTRAINED else name] = RunFolder(path).result or {}
    return results


def _table(
    run: ReportedRun, client: str, stored: Sequence[Stored], results: Mapping[str, Result]
) -> Table:
    scored = [(each, score) for each in stored for score in each["scores"]]
    labels = {(score["task"], each["task"]) for each, score in scored}
    origins = Counter(label for label, _ in labels)  # the stored tasks that have this label
    rows: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for each, score in scored:
        label, metric = score["task"], f"{score['metric']} {_arrow(score['higher'])}"
        task = f"{label} ({each['task']})" if origins[label] > 1 else label
        row = task, metric, str(score["samples"] or "")
        rows.setdefault(row, {})[each["method"]] = score
    cells = [
        [*row, *(_cell(by_method.get(name), by_method.get(BASE)) for name in results)]
        for row, by_method in rows.items()
    ]
    return Table(
        f"{run.config['name']}: {client}'s models on {client}'s own text, and on tasks of lm-eval",
        ["task", "metric", "samples", *results],
        [list(_own(run, client, results)), *cells],
        "↑: higher is better. ↓: lower is better. ±: standard error. In brackets: the difference "
        "from the base.",
    )


def _arrow(higher: bool) -> str:
    return "↑" if higher else "↓"


def _cell(score: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> str:
    if score is None or score["value"] is None:
        return ""
    error = "" if score["error"] is None else f" ± {score['error']:.4f}"
    cell = f"{score['value']:.4f}{error}"
    if base is None or base is score or base["value"] is None:
        return cell
    return f"{cell} ({score['value'] - base['value']:+.4f})"


def _own(run: ReportedRun, client: str, results: Mapping[str, Result]) -> Iterator[str]:
    """Yield the cells of the row with a client's scores on its own test text."""
    metric = shown_of(filter(None, results.values()), run.config["evaluation"].get("metric"))
    scores: dict[str, Any] = {}
    for name, result in results.items():
        clients = {**result[result["reports"]], SERVER: result.get("server")} if result else {}
        if score := clients.get(client):
            scores[name] = score
    yield f"{run.split} text"
    yield f"{metric.label} {_arrow(metric.higher)}"
    yield str(scores.get(run.method, {}).get("samples", ""))
    for name in results:
        cell = metric.cell(scores[name][metric.name]) if name in scores else ""
        if cell and name != BASE and BASE in scores:
            value, base = (metric.shown(scores[key][metric.name]) for key in (name, BASE))
            cell += f" ({value - base:+.{metric.digits}f})"
        yield cell
