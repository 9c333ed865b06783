"""Comparison of a deployment with the undisturbed runs."""

import json
from typing import TYPE_CHECKING, Any

from coterie.messages.names import BYTES, SECONDS
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_tensors, client_of, sides
from crashes.state import CLIENTS

if TYPE_CHECKING:
    from crashes.deployments import Deployment

Line = dict[str, Any]


def compare(actual: "Deployment", undisturbed: "Deployment", local: RunFolder) -> None:
    """Compare a deployment's states, results, scores and metrics with those of undisturbed runs.

    Not compared are durations, the secrets that each process of a client draws, the sums of bytes
    in the server's result, and the number of times that the server recorded the bytes of an order
    that it repeated.

    Args:
        actual: The deployment.
        undisturbed: A deployment in which no process was killed.
        local: The same run in one process.

    Raises:
        AssertionError: They differ.
    """
    for side in sides(local):
        name = client_of(side)
        assert_same(actual.client(name) if name else actual.server, local, side)
    expected, result = local.outcome, actual.server.result
    assert expected is not None, "the local run has no result"
    assert result is not None, "the server has no result"
    for point in ("trained", "aggregated", "kept"):
        assert result[point] == expected[point], f"the server's results differ: {point}"
    for name in CLIENTS:
        own = actual.client(name).outcome
        assert own is not None, f"{name} has no result"
        for point in ("trained", "aggregated", "kept"):
            assert own[point] == {name: expected[point][name]}, f"{name}: {point} differs"
        for point in ("trained", "aggregated"):
            items = {name: expected["items"][point][name]}
            assert own["items"][point] == items, f"{name}: scores of windows differ"
        lines = without_times(actual.client(name))
        assert lines == without_times(undisturbed.client(name)), f"the metrics of {name} differ"
    assert measured(actual.server) == measured(undisturbed.server), "the server's metrics differ"
    assert transferred(actual.server) == transferred(undisturbed.server), "byte counts differ"


def assert_same(actual: RunFolder, expected: RunFolder, side: str) -> None:
    """Check that a state has the same tensors and values in two runs, except for secrets."""
    own, other = actual.load(side), expected.load(side)
    assert_same_tensors(own, other, side)
    parts = dict(other.walk())
    for path, part in own.walk():
        values = {**part.values, "secrets": None}
        assert values == {**parts[path].values, "secrets": None}, (side, path)


def without_times(folder: RunFolder) -> list[Line]:
    """Return the metrics of a run, in order, with 0 in place of each duration."""
    return [m | {"value": 0} if m["name"] == SECONDS else m for m in folder.metrics()]


def measured(folder: RunFolder) -> list[Line]:
    """Return the metrics of a server, in order, without byte counts."""
    return [line for line in without_times(folder) if not line["name"].startswith(BYTES)]


def transferred(folder: RunFolder) -> set[str]:
    """Return the byte counts of a server, each once: it records a repeated order again."""
    return {json.dumps(m) for m in folder.metrics() if m["name"].startswith(BYTES)}
