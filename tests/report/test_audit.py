"""An audit lists what travels and what stays, whatever their tensors are called."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from coterie.analysis.audit import NEVER, OTHERS, SHARED, STAYS, WAYS, WHOLE, _declared, audit_run
from coterie.analysis.tables import Table
from coterie.federation.statements import FORWARDED, PRIVACY
from coterie.messages import Field, Message, MessageError, Schema
from coterie.messages.envelope import Reply, unseal
from coterie.methods.adapter import AdapterServer
from coterie.methods.averaging import FedAvg
from coterie.methods.registry import method_from
from coterie.methods.tensors import copied
from coterie.testing.loop import deploy

DENSE = {("dense, attention.out", 4), ("dense, attention.qkv", 4)}
"""The tensors of attention pairs on the small GPT-2 (two layers): their label and number."""


def sets(count: int) -> set[tuple[str, int]]:
    """Return the labels and numbers of tensors of `count` sets of pairs on MLPs."""
    return {(f"generalist {n + 1}, mlp.{way}", 4) for n in range(count) for way in ("up", "down")}


def audited(config, **changes) -> dict[str, Table]:
    """Return the tables of a run whose clients are alike, by subject."""
    declared, *tables = audit_run(config(**changes))
    tables = [table for table in tables if not table.title.startswith("metrics")]
    named = {table.title.removeprefix("diarist, poet, whaler: "): table for table in tables}
    assert named.keys() == {OTHERS, "trained layers", *WAYS.values(), STAYS}
    return {**named, "declared": declared}


def kinds(table: Table, group: str) -> set[tuple[str, int]]:
    """Return the labels and numbers of tensors that a table lists for a group."""
    rows = [row for row in table.rows if row[0] == group]
    assert all(int(row[-1].replace(",", "")) > 0 for row in rows)
    return {(row[1], int(row[2].split()[0])) for row in rows}


def test_shared_parts_travel_and_the_others_stay(config) -> None:
    tables = audited(config)
    travels = DENSE | sets(1)
    assert kinds(tables[WAYS["up"]], "adapter") == kinds(tables[WAYS["down"]], "adapter") == travels
    own = {("specialist 1, mlp.up", 4), ("specialist 1, mlp.down", 4), ("router, mlp", 2)}
    assert kinds(tables[STAYS], "adapter") == own
    moments = kinds(tables[STAYS], "training, experts")
    assert moments == {(f"optimiser's {m}", 24) for m in ("step", "exp_avg", "exp_avg_sq")}


def test_a_private_adapter_with_the_names_of_the_shared_one_stays(config) -> None:
    pytest.importorskip("nevergrad")
    tables = audited(config, method="fdlora")
    travels = {("dense, attention.qkv", 4)}
    assert kinds(tables[WAYS["up"]], "adapter") == kinds(tables[STAYS], "private") == travels
    assert kinds(tables[STAYS], "adapter") == set()


@pytest.mark.parametrize("method", ["hetlora", "flexlora"])
def test_what_travels_in_a_group_of_another_name_does_not_stay(method, config) -> None:
    tables = audited(config, method=method)
    up = tables[WAYS["up"]]
    assert (kinds(up, "adapter"), kinds(up, "experts")) == (DENSE, sets(1))
    assert {row[0] for row in tables[STAYS].rows} == {"training, joint"}


def test_the_last_exchange_is_shown_and_the_others_uploads_are_summed(config) -> None:
    tables = audited(config, method={"name": "pcl-2", "warmup": 2, "every": 1}, rounds=4)
    adapter = DENSE | sets(2)
    for group in ("adapter", "update"):
        assert kinds(tables[WAYS["up"]], group) == adapter
        twice = {(kind, 2 * count) for kind, count in adapter}
        assert kinds(tables[WAYS["down"]], f"others' {group}") == twice
    assert kinds(tables[STAYS], "start") == adapter
    others = {row[0]: row[1] for row in tables[OTHERS].rows}
    assert "change of the adapter since the last exchange" in others[FORWARDED]
    assert others[PRIVACY] == "no noise is added to anything"
    (whole,) = [row for row in tables[WAYS["down"]].rows if row[0] == WHOLE]
    assert whole[-1].startswith("≤")  # the others' names differ in length


@pytest.mark.parametrize("method", ["auto", "pcl-2", "fedlease"])
def test_clients_that_differ_only_in_the_length_of_their_names_share_tables(method, config) -> None:
    names = ["a" * n for n in (1, 2, 9, 30)]
    run = config(method=method)
    clients = [run.clients[0].model_copy(update={"name": name}) for name in names]
    titles = [table.title for table in audit_run(run.model_copy(update={"clients": clients}))]
    assert sum(title.endswith(STAYS) for title in titles) == 1


def test_an_audit_says_where_losses_and_scores_are_shared(config) -> None:
    assert audited(config)[STAYS].note == NEVER
    assert audited(config, deployment={"share_metrics": True})[STAYS].note == SHARED


@pytest.mark.parametrize(
    "method", ["comigs-1g1s", {"name": "pcl-2", "warmup": 1, "every": 1}], ids=["comigs", "pcl"]
)
def test_an_audit_lists_every_figure_that_a_deployment_shares(method, config, tmp_path) -> None:
    run = config(method=method, rounds=3, deployment={"share_metrics": True})
    [figures] = [table for table in audit_run(run) if table.title.startswith("metrics")]
    loop = deploy(run, tmp_path)
    sent: set[str] = set()
    for data in loop.seen:
        with suppress(MessageError):
            sent |= {entry.name for entry in unseal(Reply, data)[0].entries or []}
    assert {name for name, _ in figures.rows} == sent - {"kept", "test/kept"}
    assert "test/aggregated" in sent


def test_two_fields_of_one_name_are_two_lines() -> None:
    tensors = Field("adapter", "tensors")
    schema = Schema(
        hello=(Field("shapes", "shapes", "json"),),
        up=(replace(tensors, reduce="rows"), tensors, tensors),
        down=(tensors, replace(tensors, peers=True, when="in trials")),
    )
    run: Any = SimpleNamespace(schema=schema, config=SimpleNamespace(label="a method"))
    up, down = "from the client to the server", "from the server to the client"
    several = "averaged over clients, with several sets of weights"
    assert [(name, way, contents) for name, _, way, contents in _declared(run).rows] == [
        ("shapes", f"{up}, once", "shapes"),
        ("adapter", f"{up}, every exchange", f"tensors ({several})"),
        ("adapter", f"{up}, every exchange", "tensors (not averaged)"),
        ("adapter", f"{down}, every exchange", "tensors"),
        ("others' adapter", f"{down}, in trials", "tensors"),
    ]


END = "after the last round"


@pytest.mark.parametrize(
    ("method", "downloads"),
    [
        ("auto", {"every exchange", "in trials", END, f"in trials, and {END}"}),
        ({"name": "pcl-1", "every": 1}, {"at intervals of 1 round, from round 5 on"}),
        ("fedlease", {"every exchange, from round 6 on"}),
        ("fedmkt-fedavg", {"every round"}),
    ],
)
def test_methods_say_how_often_a_client_receives_a_field(method, downloads) -> None:
    assert {field.when for field in method_from(method).schema().down} == downloads


class Both(FedAvg):
    """A method whose download holds a client's own mean and the other clients' uploads."""

    name: ClassVar[str] = "both"

    def schema(self) -> Schema:
        schema = super().schema()
        return replace(schema, down=(*schema.down, replace(schema.down[0], peers=True)))

    def server(self, context):
        return BothServer(self, context)


class BothServer(AdapterServer):
    def download(self, value, client, exchange):
        own = super().download(value, client, exchange).groups
        names = [name for name in value.held if name != client]
        peers = {name: {group: copied(own[group]) for group in own} for name in names}
        return Message(exchange.turn.exchange, own, peers=peers)


def test_a_clients_own_group_is_told_from_its_peers(config) -> None:
    tables = audited(config, method=Both())
    declared = [row[0] for row in tables["declared"].rows if row[2].startswith("from the server")]
    assert declared == ["adapter", "others' adapter"]
    own = kinds(tables[WAYS["down"]], "adapter")
    assert own == DENSE | sets(2)
    assert kinds(tables[WAYS["down"]], "others' adapter") == {(kind, 2 * n) for kind, n in own}
