"""The sizes of an exchange's messages, against the sizes of the tensors that are sent."""

import pytest

from coterie.adapters import of_roles
from coterie.analysis.audit import WHOLE
from coterie.analysis.trial import first_exchange, start
from coterie.engines.session import Session
from reproduce.messages import message_tables, traffic


def total(config, client: str, *roles: str) -> int:
    """Return the bytes of a client's fp32 parameters of some roles, counted on its adapter."""
    run = start(Session(config), config)
    adapter = run.clients[client].adapter  # pyright: ignore[reportAttributeAccessIssue]
    return sum(4 * p.numel() for p in adapter.tensors(of_roles(*roles)).values())


def sizes(config) -> dict[tuple[str, str, str], int]:
    """Return the bytes by client, way and field."""
    return {
        (client, field["way"], field["field"]): size
        for field in traffic(Session(config), config)
        for client, size in field["bytes"].items()
    }


@pytest.mark.slow
def test_fields_weigh_what_their_tensors_do(config) -> None:
    run = config()
    sent = sizes(run)
    for client in ("diarist", "poet", "whaler"):
        for way in ("up", "down"):
            assert sent[client, way, "adapter"] == total(run, client, "dense", "generalist")
            whole = sent[client, way, WHOLE]
            assert whole > total(run, client, "dense", "generalist")


def test_a_method_that_begins_alone_is_waited_for(config) -> None:
    run = config(method={"name": "pcl-2", "warmup": 2, "every": 1}, rounds=4)
    sent = sizes(run)
    adapter = total(run, "poet", "dense", "generalist")
    assert sent["poet", "up", "adapter"] == sent["poet", "up", "update"] == adapter
    # The other two clients' come down, each field in its own place.
    down = {
        field: size for (name, way, field), size in sent.items() if (name, way) == ("poet", "down")
    }
    assert down["adapter"] == down["update"] == 2 * adapter


@pytest.mark.parametrize(
    "method", ["local", {"name": "pcl-2", "warmup": 9}], ids=["local", "pcl-2"]
)
def test_where_nothing_is_exchanged_nothing_weighs(method, config) -> None:
    run = config(method=method, rounds=2)
    assert {size for (*_, field), size in sizes(run).items() if field != WHOLE} <= {0}
    assert all(
        not list(m["up"].tensors()) for m in first_exchange(start(Session(run), run)).values()
    )


def test_clients_that_differ_are_shown_by_least_and_most(config) -> None:
    run = config(method={"name": "flexlora", "mlp": {"rank": {"poet": 2, "others": 4}}})
    columns = {"X": {"FlexLoRA": traffic(Session(run), run)}}
    (table,) = message_tables({"table": "T", "columns": columns})
    (row,) = [row for row in table.rows if row[1:3] == ("up", "experts")]
    least, most = (total(run, client, "generalist") for client in ("poet", "whaler"))
    assert row[4] == f"{least:,} to {most:,}"


def test_the_papers_figures_stand_beside_what_is_uploaded(config) -> None:
    run = config()
    columns = {"X": {"R": traffic(Session(run), run)}}
    paper = {"X": {"adapter": "9 MB"}}
    (table,) = message_tables({"table": "T", "columns": columns, "paper": paper})
    assert [(row[1], row[5]) for row in table.rows if row[5]] == [("up", "9 MB")]
