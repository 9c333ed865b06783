"""Scores of a model on tasks of lm-eval-harness, the package `lm-eval`."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from hashlib import blake2b
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel

from coterie.bases import Tokenizer
from coterie.data.chat_sandbox import sandboxed
from coterie.errors import CoterieError, imports_for
from coterie.files import read_file
from coterie.registry import nearest

BATCH = 8
"""The number of sequences that a model reads at the same time."""
SEED = 1234
"""The seed with which tasks draw examples for their prompts; lm-eval's own default."""
FILES = (".yaml", ".yml")
"""The extensions of files that define a task."""


class Harness:
    """Tasks of lm-eval, which are loaded when they are first needed.

    Args:
        tasks: Names of tasks or groups of tasks that lm-eval defines, and paths of YAML files.

    Raises:
        CoterieError: lm-eval is not installed, a file does not exist, two tasks have the same name,
            or lm-eval has no such task.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        sources = _sources(tasks)
        self._files = {name: source for name, source in sources.items() if isinstance(source, Path)}
        for path in self._files.values():
            if not path.is_file():
                raise CoterieError(f"--tasks: there is no file {path}; correct the path.")
        self.names = list(sources)
        """The tasks' names; the name of a task that a file defines is the file's name."""
        with imports_for("`coterie evaluate`", "eval"), _quiet():
            from lm_eval.tasks import TaskManager

            # Reading the definitions of all tasks takes seconds.
            named = [name for name in self.names if name not in self._files]
            self._manager = TaskManager(include_defaults=bool(named))
        for name in named:
            if name not in self._manager.task_index:
                hint = nearest(name, self._manager.all_tasks)
                raise CoterieError(f"lm-eval has no task {name!r}.{hint}")
        self._loaded: dict[str, dict[str, Any]] = {}

    def digest(self, name: str) -> str | None:
        """Return a hash of the file that defines a task; None if lm-eval defines the task."""
        path = self._files.get(name)
        return None if path is None else blake2b(read_file(path), digest_size=16).hexdigest()

    def scores(
        self, name: str, model: PreTrainedModel, tokenizer: Tokenizer, limit: int | None, chat: bool
    ) -> list[dict[str, Any]]:
        """Score a model on a task.

        Args:
            name: The name of the task, from `names`.
            model: The model.
            tokenizer: The model's tokenizer.
            limit: The number of samples of each task; None: all samples.
            chat: Whether prompts are rendered with the tokenizer's chat template.

        Returns:
            A mapping for each metric, with the keys of `coterie.runs.read.TaskScore`.

        Raises:
            CoterieError: The task or its data cannot be loaded, or lm-eval refuses the task.
        """
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        tasks = self._loaded.get(name) or self._loaded.setdefault(name, self._load(name))
        wrap: Any = HFLM
        with _quiet(), sandboxed():
            scored = wrap(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
            options: Any = {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
            options |= {"task_dict": tasks, "limit": limit, "log_samples": False}
            try:
                results: Any = evaluate(scored, **options)
            except (ValueError, TemplateError) as error:
                raise CoterieError(f"lm-eval cannot score the task {name!r}: {error}") from error
        return list(_scores(results))

    def _load(self, name: str) -> dict[str, Any]:
        spec: Any = str(self._files.get(name, name))
        try:
            with _quiet():
                loaded: Any = self._manager.load([spec])
        except Exception as error:  # task definitions contain code that may raise anything
            raise CoterieError(
                f"The task {name!r} or its data cannot be loaded: {_line(error)} The data of "
                "lm-eval's own tasks come from the hub; without a network, use a YAML file with "
                "local data."
            ) from error
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        return loaded


def _sources(tasks: Sequence[str]) -> dict[str, str | Path]:
    """Return the names of tasks, with the name in lm-eval or the file that defines the task.

    Raises:
        CoterieError: Two tasks have names that are equal or differ only in case.
    """
    sources: dict[str, str | Path] = {}
    by_folded_name: dict[str, str | Path] = {}
    for task in tasks:
        source = Path(task) if task.endswith(FILES) else task
        name = source.stem if isinstance(source, Path) else source
        earlier = by_folded_name.setdefault(name.casefold(), source)
        if earlier != source:
            raise CoterieError(
                f"--tasks: {earlier} and {source} have the same name in the results; rename a file."
            )
        sources[name] = source
    return sources


def _scores(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the scores of a task, or of the groups if the task is a group with scores."""
    for task, values in (results.get("groups") or results["results"]).items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            yield {
                "task": task,
                "metric": metric if chosen == "none" else f"{metric} ({chosen})",
                "value": float(value) if isfinite(value) else None,
                "error": error if isinstance(error, float) and isfinite(error) else None,
                "higher": bool(results["higher_is_better"].get(task, {}).get(metric, True)),
                "samples": results["n-samples"].get(task, {}).get("effective"),
            }


def _line(error: Exception) -> str:
    """Return an error's first line, as a sentence."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if text.endswith(".") else f"{text}."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's output out of stdout inside the with block.

    On a terminal, lm-eval's progress bars are shown on stderr. Its other messages are hidden.
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    shown = sys.stderr if sys.stderr.isatty() else StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            yield
    finally:
        logger.setLevel(level)
