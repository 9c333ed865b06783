"""Out-of-memory errors that name the task and the settings that need less memory."""

from contextlib import AbstractContextManager

from coterie.config.run import RunConfig
from coterie.errors import enough_memory
from coterie.exchanges.mean import SMALLER
from coterie.training.context import ClientId

EVALUATION = "the evaluation"
"""The task that uses `evaluation.batch`; other tasks use `training.micro_batch`."""


def memory_for(task: str, config: RunConfig, client: ClientId) -> AbstractContextManager[None]:
    """Raise CoterieError if the body of the `with` statement runs out of memory.

    Args:
        task: A name of the task for the error message, such as "a download".
        config: The run.
        client: The name of the client, or of the server, that executes the task.
    """

    def remedies() -> list[str]:
        settings = list[str]()
        if task == EVALUATION and config.evaluation.batch > 1:
            settings.append("evaluation.batch: 1")
        if task != EVALUATION and config.training.at_once > 1:
            settings.append("training.micro_batch: 1")
        if config.base_of(client).weights != "nf4":
            settings.append("base.weights: nf4")
        return [*settings, *SMALLER]

    return enough_memory(f"{task} of {client!r}", remedies)
