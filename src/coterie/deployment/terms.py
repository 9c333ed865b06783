"""The terms of a run: what a server requests from a client, and what the client has agreed to.

Functions that compare a run with this machine return the predicate of a sentence about the run
("needs the plugin ..."), or None if there is no difference.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coterie.config.plugins import plugin_for
from coterie.config.run import RunConfig
from coterie.federation.participants import public_digest
from coterie.messages.envelope import Order
from coterie.messages.formats import PROTOCOL
from coterie.privacy.ledger import Budget, Ledger

Terms = Mapping[str, Any]
"""Plain data of a run: the settings that a client receives, and the hashes of the run's plugins and
public text."""
ABSENT = "nothing"
"""The value shown in messages for a setting that is missing from the agreed or requested terms."""


def agreed_terms(config: RunConfig, client: str) -> Terms:
    """Return the terms that a client agrees to by providing a run file in advance."""
    return _terms(config.visible_to(client))


def requested_terms(order: Order) -> Terms:
    """Return the terms requested by an order to join."""
    terms = _terms(order.config or {})
    plugins = {key: plugin.sha256 for key, plugin in (order.plugins or {}).items()}
    return {**terms, "plugins": plugins, "public": order.public}


def _terms(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that need the client's agreement.

    In the section `deployment`, only `share_metrics` needs agreement. Outside this section, all
    settings need agreement except the run's name and `training.precision`, which each machine
    chooses for itself if the run file does not contain it.
    """
    settings = {k: v for k, v in run.items() if k not in ("name", "deployment")}
    terms = json.loads(json.dumps(settings))
    if isinstance(training := terms.get("training"), dict):
        training.pop("precision", None)
    section = run.get("deployment")
    shares = section.get("share_metrics", False) if isinstance(section, Mapping) else False
    return {**terms, "share_metrics": shares}


def disagreement(agreed: Terms, order: Order) -> str | None:
    """Return how the requested run differs from the agreed terms, or None if it does not differ."""
    if changes := differences(agreed, requested_terms(order)):
        return f"differs from what was agreed ({'; '.join(changes)})"
    return None


def public_text_mismatch(order: Order, config: RunConfig) -> str | None:
    """Return a message if the run's public text differs from this machine's copy.

    If the texts are the same, return None.
    """
    if public_digest(config) == order.public:
        return None
    return f"has a different public text than {config.data.public}"


def budget_excess(budgets: Sequence[Budget], ledger: Ledger) -> str | None:
    """Return a message if a run would exceed the client's privacy budget, and None otherwise.

    Args:
        budgets: The privacy budgets that the run would spend, one for each noise mechanism.
        ledger: The ledger of all the client's runs, with the client's limit.
    """
    if not budgets or ledger.limit is None or ledger.affords(budgets):
        return None
    limit, delta, _ = ledger.limit
    sent = " and ".join(
        f"{name} without noise" if math.isinf(epsilon) else f"{name} with an epsilon of {epsilon:g}"
        for epsilon, _, name in budgets
    )
    return (
        f"would send {sent}; this client's limit for all runs "
        f"is {limit:g}, of which {ledger.spent(delta):.3g} is spent (see --epsilon)"
    )


def version_mismatch(order: Order) -> str | None:
    """Return a message if this client lacks the run's protocol version or a plugin of the run.

    If nothing is missing, return None.
    """
    if order.protocol != PROTOCOL:
        return (
            f"uses protocol version {order.protocol}, but this client uses version {PROTOCOL}; "
            "install the same version of Coterie on both sides"
        )
    for key, plugin in (order.plugins or {}).items():
        loaded = plugin_for(key)
        if loaded is None:
            remedy = (
                "get this file from the server's operator, and start this client with --plugin FILE"
            )
            return f"needs the plugin {plugin.file}; {remedy}"
        if loaded.sha256 != plugin.sha256:
            remedy = "the server and this client need the same file"
            return f"has a different version of the plugin {plugin.file}; {remedy}"
    return None


def extra_plugin(order: Order, config: RunConfig) -> str | None:
    """Return a message if the client uses a plugin that the server does not use.

    If there is no such plugin, return None.
    """
    if extra := sorted(config.plugins.keys() - (order.plugins or {}).keys()):
        return (
            f"uses {extra[0]!r}, which this client takes from a plugin and the server does not; "
            "start this client without --plugin"
        )
    return None


def differences(agreed: Terms, requested: Terms) -> list[str]:
    """Return a description of each setting whose requested value differs from the agreed value.

    Top-level keys that `agreed` lacks, such as the hashes of plugins, are not compared here,
    because other functions check them.
    """
    before = dict(flat(agreed))
    after = {key: v for key, v in flat(requested) if key.partition(".")[0] in agreed}
    return [
        f"{key}: agreed {_value(before, key)[:100]}, requested {_value(after, key)[:100]}"
        for key in sorted(before.keys() | after.keys())
        if _value(before, key) != _value(after, key)
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each nested setting."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else ABSENT
