"""The terms of runs with transforms: budget, plugins, and the list of shared values."""

from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.analysis.audit import audit_run
from coterie.cli.console import in_words
from coterie.config.plugins import load_plugin
from coterie.deployment.client import Worker
from coterie.deployment.orders import join_fields
from coterie.deployment.site import Site, ledger_of
from coterie.deployment.terms import extra_plugin, version_mismatch
from coterie.messages.envelope import Order, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.privacy.ledger import Budget
from coterie.testing.loop import RUN, deploy, site

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    for file in sorted(EXAMPLES.glob("*.py")):
        load_plugin(file)


@pytest.fixture
def noisy(config: Any) -> coterie.RunConfig:
    noise = {"name": "clipped_gaussian", "epsilon": 8.0}
    return config(rounds=2, aggregation={"transforms": [noise], "largest_change": None})


def order_to_join(run: coterie.RunConfig, **changes: Any) -> Order:
    header = {"run": RUN, "client": "poet", "kind": "join", "turn": 0, "protocol": PROTOCOL}
    return Order(**header, **{**join_fields(run, "poet", 3, None), **changes})


@pytest.mark.parametrize(("limit", "fault"), [(8.0, None), (7.9, "budget"), (None, None)])
def test_a_client_takes_part_within_its_limit(limit, fault, noisy, tmp_path) -> None:
    base = site(noisy, "poet", tmp_path)
    most = None if limit is None else Budget(limit, 1e-5)
    worker = Worker(Site(base.name, base.texts, base.out, base.base, limit=most))
    reply, _ = unseal(Reply, worker.answer(seal(order_to_join(noisy))))
    assert reply.fault == fault
    if fault:
        assert "updates from all of this client's text with an epsilon of 8" in worker.error
    worker.close()


def test_each_upload_is_counted_once(noisy, tmp_path) -> None:
    deploy(noisy, tmp_path)
    for client in noisy.clients:
        ledger = ledger_of(site(noisy, client.name, tmp_path), RUN)
        assert len(ledger.runs[RUN]) == noisy.rounds
        assert ledger.spent(1e-5) == pytest.approx(8.0)


def test_the_agreement_names_transforms_and_what_they_spend(noisy) -> None:
    shown = dict(in_words(order_to_join(noisy), noisy))
    assert shown["transforms"].startswith("clipped_gaussian: ")
    assert "epsilon 8 and delta 1e-05 for the whole run" in shown["privacy"]
    assert shown["plugins"].startswith("gaussian.py ")


def test_a_client_needs_the_same_file(noisy) -> None:
    order = order_to_join(noisy)
    assert version_mismatch(order) is None
    assert extra_plugin(order, noisy) is None
    assert order.plugins is not None
    [(key, plugin)] = order.plugins.items()
    other = {key: plugin.model_copy(update={"sha256": "0" * 64})}
    assert "different version of the plugin gaussian.py" in (
        version_mismatch(order_to_join(noisy, plugins=other)) or ""
    )
    unknown = {"transform nosuch": plugin}
    assert "needs the plugin gaussian.py" in (
        version_mismatch(order_to_join(noisy, plugins=unknown)) or ""
    )
    less = order_to_join(noisy, plugins=None)
    assert (
        extra_plugin(less, noisy)
        == f"uses {key!r}, which this client takes from a plugin and the server does not; start "
        "this client without --plugin"
    )


def test_the_audit_shows_messages_as_they_are_sent(config) -> None:
    run = config(aggregation={"transforms": ["int8"]})
    declared, *tables = [table.markdown() for table in audit_run(run)]
    assert "adapter.scale" in declared
    [up] = [table for table in tables if "from the client to the server, in one exchange" in table]
    assert "int8" in up
