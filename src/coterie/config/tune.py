"""Tuning: lists of values to try for keys of a run file."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from coterie.config.errors import validated
from coterie.config.sections import RunFile
from coterie.config.values import put, read_yaml
from coterie.errors import CoterieError

TUNABLE = ("rounds", "method", "training", "aggregation")
"""Sections and keys that can be tuned. All other keys change the data or the evaluation."""
NOT_TUNABLE = ("method", "method.name", "training.precision", *TUNABLE[2:])
"""Keys within `TUNABLE` that cannot be tuned.

Methods are compared instead of tuned. All trials share bases in one precision. The settings of a
section are tuned one by one, not all together.
"""


def read_tune(options: Sequence[str]) -> dict[str, list[Any]]:
    """Parse options of tuning, such as `training.batch=4,8`; each value is parsed as YAML.

    Returns:
        A mapping from each dotted key to a list of the values to try.
    """
    tune: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        try:
            values = read_yaml(f"[{text}]")
        except yaml.YAMLError:
            values = None
        if not (key and equals and values):
            raise CoterieError(
                f"--tune {option!r} is not a key with values, such as "
                "training.learning_rate=1e-4,1e-3."
            )
        if key in tune:
            raise CoterieError(f"--tune gives {key} twice; list all values in one --tune.")
        tune[key] = values
    return tune


def check_tune(tune: Mapping[str, Sequence[Any]], split: str) -> None:
    """Raise CoterieError if a key cannot be tuned, or if `split` is not the test split.

    Models must be scored on the test text, because the validation text is used to choose values.

    Args:
        tune: The values to try for each dotted key.
        split: The split that models are scored on (`evaluation.split`).
    """
    for key, values in tune.items():
        if not values:
            raise CoterieError(f"{key} has no values to try; list at least one value.")
        if key.partition(".")[0] not in TUNABLE or key in NOT_TUNABLE:
            raise CoterieError(
                f"{key} cannot be tuned; choose from the settings of {', '.join(TUNABLE)}."
            )
    if tune and split != "test":
        raise CoterieError(
            "Tuning uses the validation text to choose values, so models must be scored on the "
            "test text; remove evaluation.split."
        )


def check_trials(values: dict[str, Any], tune: Mapping[str, Sequence[Any]]) -> RunFile:
    """Validate a run file, once without changes and once with each of the values to try.

    The method's settings are not checked, because checking them needs torch.

    Args:
        values: The plain data of the run file.
        tune: The values to try for each dotted key.

    Returns:
        The validated run file, without any of the values to try.

    Raises:
        CoterieError: The run file or a value is invalid; the message names the first mistake.
    """
    file = validated(RunFile, values)
    check_tune(tune, file.evaluation.split)
    for key, value in ((key, value) for key, choices in tune.items() for value in choices):
        trial = dict(values)
        put(trial, key, value)
        validated(RunFile, trial)
    return file
