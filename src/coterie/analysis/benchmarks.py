"""Scores of a run's models on general tasks: how to compute them, and tables of them.

The tasks are those of lm-eval, and Coterie's own task `general`: the general questions that ship
with it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from coterie.analysis.experiments import ReportedRun
from coterie.analysis.frame import Result
from coterie.analysis.tables import Table, shown_of
from coterie.bases import Base
from coterie.data.spec import DataSpec
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate
from coterie.federation.participants import EVERYONE
from coterie.files import path_part, refuse_links, sha256_of, write_json, writing
from coterie.inference.finished import tokenizer
from coterie.inference.harness import Harness
from coterie.inference.models import BASE, RunModels, Step
from coterie.inference.questions import SHIPPED, knowledge, questions
from coterie.methods.contract import SERVER
from coterie.runs import RunFolder
from coterie.runs.read import TaskScores, read_json

FOLDER = "evaluations"
"""The subfolder of a run folder that contains the scores."""
GENERAL = "general"
"""The name of the task that consists of Coterie's general questions."""
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
    """Score the base and the models of some clients on general tasks.

    The models are the clients' models of the run's method and of the baselines. Equal models are
    scored once. The scores are written to the run folder, and are not computed again.

    Args:
        run: The run folder.
        clients: The names of the clients.
        tasks: `general` for Coterie's general questions; names of tasks or groups of tasks that
            lm-eval defines; and paths of YAML files.
        limit: The number of samples of each task of lm-eval; by default, all samples.
        step: Function that is called before each model is loaded. Its arguments are the name of the
            model, the number of models loaded so far, and the number of all models.

    Returns:
        A table for each client, with all scores in the run folder; see `tables`.

    Raises:
        CoterieError: The run is not finished or has no such client, lm-eval is not installed, a
            task cannot be loaded, or the models of a run without conversations or instructions are
            asked general questions.
    """
    models, folder = RunModels(Path(run)), RunFolder(Path(run))
    models.check(clients)
    if not clients or not tasks or (limit is not None and limit < 1):
        raise CoterieError("Give at least one client, one task, and one sample of each task.")
    data, others = models.config.data, [task for task in tasks if task != GENERAL]
    harness = Harness(others) if others else None
    digests = {} if harness is None else {name: harness.digest(name) for name in harness.names}
    if GENERAL in tasks:
        digests = {GENERAL: sha256_of(SHIPPED)} | digests
    with folder.lock():
        known = {_key(each["key"]): _of_model(each) for each in _stored(folder.path)}
        for method, client, base, model, digest, gate in models.attached(clients, step):
            for name, task in digests.items():
                key = {"model": digest, "task": name, "file": task, "limit": limit}
                if name == GENERAL and gate is not None:
                    key["gate"] = gate.digest
                if _key(key) not in known and name == GENERAL:
                    known[_key(key)] = _general(base, model, data, gate)
                elif _key(key) not in known:
                    assert harness is not None
                    read = tokenizer(folder.path, client)
                    scores = harness.scores(name, model, read, limit, data.chats)
                    known[_key(key)] = {"lm_eval": version("lm-eval"), "scores": scores}
                named = {"method": method, "task": name, "key": key}
                for owner in clients if client == EVERYONE else [client]:
                    _write(folder.path, {"client": owner, **named, **known[_key(key)]})
    return tables(ReportedRun.read(folder), clients)


def general_table(run: str | Path, step: Step = lambda *_: None) -> Table:
    """Ask all models of a run the general questions, and return a table with a row per method.

    Scores that are stored in the run folder are not computed again.

    Args:
        run: The run folder.
        step: Function that is called before each model is loaded; see `Step`.
    """
    models, folder = RunModels(Path(run)), RunFolder(Path(run))
    clients = [*folder.description["clients"]]
    evaluate(run, clients, [GENERAL], step=step)
    stored = [each for each in _stored(folder.path) if each["task"] == GENERAL]
    rows: list[list[str]] = []
    for method in models.methods:
        own = [each for each in stored if each["method"] == method]
        values = zip(*([score["value"] for score in each["scores"]] for each in own), strict=True)
        percent = [f"{100 * fmean(value):.0f}" for value in values]
        rows.append([method, *reversed(percent), " ".join(own[0]["replies"][0].split())])
    asked = next(question for question in questions() if question.is_free)
    return Table(
        "General questions, which show what models have kept of what their base knew",
        ["model", "right replies (%)", "right choices (%)", asked.text],
        rows,
        f"Means over clients; the reply is that of {clients[0]}'s model. To see all scores: "
        f"coterie evaluate {run} --client {clients[0]} --tasks {GENERAL}",
    )


def _key(key: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(key.items()))


def _of_model(stored: Stored) -> dict[str, Any]:
    """Return the part of a stored file that depends only on the model and the task."""
    return {name: stored[name] for name in ("lm_eval", "scores", "replies") if name in stored}


def _general(
    base: Base, model: PreTrainedModel, data: DataSpec, gate: Gate | None
) -> dict[str, Any]:
    """Return a model's scores on the general questions, and its free replies."""
    asked = questions()
    known = knowledge(base, model, data, asked, gate)
    fractions = {"right choices": known.right_choices, "right replies": known.right_replies}
    counts = len(asked), len(known.replies)
    scores = [
        {
            **{"task": GENERAL, "metric": metric, "value": value, "higher": True},
            **{"samples": count, "error": math.sqrt(value * (1 - value) / count)},
        }
        for (metric, value), count in zip(fractions.items(), counts, strict=True)
    ]
    return {"scores": scores, "replies": list(known.replies)}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Write the scores of a model on a task to the run folder at `path`."""
    client, method, task = (_component(values[part]) for part in ("client", "method", "task"))
    file = Path(FOLDER, client, method, f"{task}.json")
    refuse_links(path, file.parent)
    with writing(path / file):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
    write_json(path / file, values)


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
        f"{run.config['name']}: {client}'s models on {client}'s own text, and on general tasks",
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
