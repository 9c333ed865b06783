"""Calls of transforms' hooks, with errors that name the transform and the hook."""

from typing import Any

from coterie.errors import CoterieError
from coterie.messages import Schema
from coterie.transforms.contract import Transform


def run_hook(
    transform: Transform, hook: str, *args: Any, error: type[CoterieError] = CoterieError
) -> Any:
    """Call a hook of a transform and return its result.

    Raises:
        CoterieError: If the hook raises an exception. A CoterieError is raised unchanged. Any other
            exception is replaced by an exception of the class `error` that names the transform and
            the hook.
    """
    try:
        return getattr(transform, hook)(*args)
    except CoterieError:
        raise
    except Exception as cause:
        raise error(failure(transform, hook, f"raised {type(cause).__name__}: {cause}")) from cause


def failure(transform: Transform, hook: str, problem: str) -> str:
    """Return the error message for a faulty hook."""
    return f"The transform {transform.name!r} failed: {hook} {problem}"


def encoded_schema(transform: Transform, schema: Schema) -> Schema:
    """Return the schema of a transform's encoded payloads, given the schema of its inputs."""
    encoded = run_hook(transform, "schema", schema)
    if not isinstance(encoded, Schema):
        problem = f"returned {type(encoded).__name__}, not a Schema."
        raise CoterieError(failure(transform, "schema", problem))
    return encoded
