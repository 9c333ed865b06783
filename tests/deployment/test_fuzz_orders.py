"""Whatever a server sends: an order that a client can take or refuse, and nothing else happens."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hostile import replace_one

from coterie.cli.console import in_words
from coterie.config.run import RunConfig, parse
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.deployment.terms import agreed_terms, differences, requested_terms
from coterie.errors import CoterieError
from coterie.messages.envelope import FAULT_MESSAGES, Order, Reply, unseal
from coterie.messages.formats import PROTOCOL
from coterie.testing.loop import RUN

METHODS = ("comigs-1g1s", "pcl-2", "fedamole", "fedmkt", "flexlora", "local")


def orders(seed: int, count: int) -> list[bytes]:
    """Draw an order to join with one to three invalid or missing values."""
    rng = random.Random(seed)
    clients = [{"name": "poet", "path": "-"}]
    header = {"run": RUN, "client": "poet", "kind": "join", "turn": 0, "protocol": PROTOCOL}
    good = [
        {**header, "config": parse({"method": name, "clients": clients}).visible_to("poet")}
        for name in METHODS
    ]
    texts = []
    for _ in range(count):
        text = json.dumps(rng.choice(good))
        for _ in range(rng.choice([1, 1, 2, 3])):
            try:
                text = replace_one(json.loads(text), rng)
            except (ValueError, RecursionError):  # it cannot be read any more, and is sent as it is
                break
        texts.append(text.encode("utf-8", "surrogatepass"))
    return [len(text).to_bytes(4, "big") + text for text in texts]


def shown(order: Order, config: RunConfig) -> bool:
    """Read all terms, and do not agree."""
    return not in_words(order, config)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), pytest.param(1, 10_000, marks=pytest.mark.slow)]
)
def test_orders_are_taken_or_refused(seed, count, tmp_path: Path) -> None:
    """Answer orders as a client does, up to the loading of its base."""
    faults = Counter[str]()
    site = Site("poet", {"path": "-"}, tmp_path, agrees=shown)
    run: RunConfig = parse({"clients": [{"name": "poet", "path": "-"}]})
    agreed = agreed_terms(run, "poet")
    for data in orders(seed, count):
        try:
            reply, body = unseal(Reply, Worker(site).answer(data))
            assert body == b""
            assert reply.fault in FAULT_MESSAGES
            faults[str(reply.fault)] += 1
            if reply.fault == "declined":  # it got so far as to be shown to somebody
                differences(agreed, requested_terms(unseal(Order, data)[0]))
        except CoterieError:
            faults["no order"] += 1
        except BaseException as error:
            raise AssertionError(f"{error!r} on {data[:3000]!r}") from error
    assert (
        min(faults["declined"], faults["failed"] + faults["refused"], faults["no order"])
        > count / 50
    )
    assert not list(tmp_path.iterdir())
