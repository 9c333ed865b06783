"""Values to tune the keys of a run file with."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from coterie.config.errors import validated
from coterie.config.sections import RunFile
from coterie.config.values import put, read_yaml
from coterie.errors import CoterieError

TUNABLE = ("rounds", "method", "training", "aggregation")
"""What may be tuned: the rest is the data, and how models are scored."""
NOT_TUNABLE = ("method", "method.name", "training.precision", *TUNABLE[2:])
"""Methods are compared, not tuned; and bases are loaded in one precision."""


def read_tune(options: Sequence[str]) -> dict[str, list[Any]]:
    """Read values by key from options such as `training.batch=4,8`; the values are YAML."""
    tune: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        try:
            values = read_yaml(f"[{text}]")
        except yaml.YAMLError:
            values = None
        if not (key and equals and values):
            raise CoterieError(
                "--tune takes a key and its values, such as training.learning_rate=1e-4,1e-3, not "
                f"{option!r}."
            )
        if key in tune:
            raise CoterieError(f"--tune has {key} twice; list all values in one --tune.")
        tune[key] = values
    return tune


def check_tune(tune: Mapping[str, Sequence[Any]], split: str) -> None:
    """Raise CoterieError for a key that may not be tuned, or for a run that is not scored on test
    text."""
    for key, values in tune.items():
        if not values:
            raise CoterieError(f"There are no values of {key} to tune with.")
        if key.partition(".")[0] not in TUNABLE or key in NOT_TUNABLE:
            raise CoterieError(
                f"{key} cannot be tuned; choose from the settings of {', '.join(TUNABLE)}."
            )
    if tune and split != "test":
        raise CoterieError(
            "Tuning uses the validation text, so models must be scored on the test text; remove "
            "evaluation.split."
        )


def check_trials(values: dict[str, Any], tune: Mapping[str, Sequence[Any]]) -> RunFile:
    """Validate the plain data of a run file, and that with each value to tune.

    Returns:
        The run file.

    Raises:
        CoterieError: naming the first mistake, settings of the method apart.
    """
    file = validated(RunFile, values)
    check_tune(tune, file.evaluation.split)
    for key, value in ((key, value) for key, found in tune.items() for value in found):
        trial = dict(values)
        put(trial, key, value)
        validated(RunFile, trial)
    return file
