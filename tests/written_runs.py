"""Run folders written by hand, as a finished run would leave them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from coterie.messages.formats import version_fields

Written = Callable[..., Path]
CONFIG: dict[str, Any] = {
    "name": "run",
    "seed": 0,
    "base": "tiny-gpt2",
    "method": {"name": "local"},
    "pooled": False,
    "rounds": 4,
    "data": {"window": 16},
    "clients": [{"name": "anna"}, {"name": "ben"}],
    "divide": None,
    "training": {"steps": 2, "batch": 2},
    "evaluation": {"every": None, "split": "test"},
    "deployment": {"anyone": False},
}
"""The keys of a run's configuration that are read without validating the whole of it."""
DESCRIPTION: dict[str, Any] = {"clients": {}, "threads": 1, "config": CONFIG}
"""The smallest content of run.json, without `version_fields()`."""


COMMANDS = {
    "report": "report {}",
    "compare": "compare --from {}",
    "generate": "generate {} --client poet --prompt I --tokens 2",
    "chat": "chat {} --client poet",
    "resume": "run --resume {}",
    "resume from a round": "run --resume {} --from-round 1",
    "expel": "expel {} --client poet",
    "forget": "forget {} --client poet",
}
"""Commands that read a run folder."""


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A function that writes a run of two clients; keyword arguments change the run."""

    def write(
        name: str,
        method: dict[str, Any],
        seed: int = 0,
        figures: Iterable[tuple[int, str | None, str, Any]] = (),
        perplexities: tuple[float, float] | None = (10.0, 20.0),
        clients: dict[str, Any] | None = None,
        accuracies: tuple[float, float] | None = None,
        served: dict[str, Any] | None = None,
        **config: Any,
    ) -> Path:
        """Write a run.

        Args:
            name: The folder.
            method: The settings of the method.
            seed: The seed.
            figures: The recorded metrics.
            perplexities: The final scores of anna and ben; None: the run is not finished.
            clients: The clients' data in run.json.
            accuracies: The final accuracies of anna and ben, who hold prompts with answers.
            served: The description of a server with its own model in run.json.
            **config: Other settings of the run.
        """
        folder = tmp_path / name
        folder.mkdir(parents=True)
        settings = CONFIG | {"name": name.split("/")[-1], "seed": seed, "method": method} | config
        entries = clients or {"anna": {"data": "1"}, "ben": {"data": "2"}}
        about = version_fields() | DESCRIPTION | {"clients": entries, "config": settings}
        if served is not None:
            about["server"] = served
        (folder / "run.json").write_text(json.dumps(about))
        figures = list(figures)
        if perplexities is not None:
            pairs = zip(("anna", "ben"), perplexities, strict=True)
            scores = {n: {"perplexity": p, "bits_per_byte": p / 10} for n, p in pairs}
            for score, accuracy in zip(scores.values(), accuracies or (), strict=False):
                score |= {"samples": 4, "accuracy": accuracy}
            figures += [(3, client, "test/trained", score) for client, score in scores.items()]
            both = {"trained": scores, "aggregated": scores}
            result = {"method": method["name"], "reports": "trained", **both}
            (folder / "result.json").write_text(json.dumps(result))
        keys = ("round", "client", "name", "value")
        lines = (json.dumps(dict(zip(keys, figure, strict=True))) + "\n" for figure in figures)
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return write
