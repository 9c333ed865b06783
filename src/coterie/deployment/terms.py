"""What a client takes part in: what it is asked to do, what it has agreed to, and what it has."""

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
"""Plain data: the run as a client is told of it, and the hashes of its plugins and public text."""
NOWHERE = "nothing"
"""Stands in a difference for a setting that is not there."""


def agreed_terms(config: RunConfig, client: str) -> Terms:
    """What whoever has the run file can agree to before a server asks."""
    return _of(config.visible_to(client))


def requested_terms(order: Order) -> Terms:
    """What an order to join asks."""
    terms = _of(order.config or {})
    plugins = {key: plugin.sha256 for key, plugin in (order.plugins or {}).items()}
    return {**terms, "plugins": plugins, "public": order.public}


def _of(told: Mapping[str, Any]) -> dict[str, Any]:
    """The run's name, and how the server waits for clients, are not theirs to agree to."""
    what = {k: v for k, v in told.items() if k not in ("name", "deployment")}
    terms = json.loads(json.dumps(what))
    return {**terms, "share_metrics": told.get("deployment", {}).get("share_metrics", False)}


def disagreement(agreed: Terms, order: Order) -> str | None:
    """How the run is not what was agreed to; None if it is."""
    if found := differences(agreed, requested_terms(order)):
        return f"is not what was agreed ({'; '.join(found)})"
    return None


def public_text_mismatch(order: Order, config: RunConfig) -> str | None:
    """How the run's public text is not the one of this machine; None if it is."""
    if public_digest(config) == order.public:
        return None
    return f"has a different public text than {config.data.public}"


def budget_excess(budgets: Sequence[Budget], ledger: Ledger) -> str | None:
    """Return how a run would spend more than this client allows; None if it would not."""
    if not budgets or ledger.limit is None or ledger.affords(budgets):
        return None
    most, delta, _ = ledger.limit
    asked = " and ".join(
        f"{what} without noise" if math.isinf(epsilon) else f"{what} with an epsilon of {epsilon:g}"
        for epsilon, _, what in budgets
    )
    return (
        f"would send {asked}; the limit of all its runs "
        f"is {most:g}, of which {ledger.spent(delta):.3g} is spent (see --epsilon)"
    )


def version_mismatch(order: Order) -> str | None:
    """How the run is not what is installed here; None if it is."""
    if order.protocol != PROTOCOL:
        return f"uses protocol version {order.protocol}, and this client {PROTOCOL}"
    for key, theirs in (order.plugins or {}).items():
        here = plugin_for(key)
        if here is None:
            how = "start this client with --plugin and the same file"
            return f"needs the plugin {theirs.file}; {how}"
        if here.sha256 != theirs.sha256:
            how = "both sides need the same file"
            return f"has a different version of the plugin {theirs.file}; {how}"
    return None


def extra_plugin(order: Order, config: RunConfig) -> str | None:
    """Return which plugin this machine would use and the server does not; None if there is none."""
    if more := sorted(config.plugins.keys() - (order.plugins or {}).keys()):
        return f"uses {more[0]!r} without a plugin; start this client without --plugin"
    return None


def differences(agreed: Terms, asked: Terms) -> list[str]:
    """Each setting that is asked for and is not as it was agreed, by its key in a run file.

    What `agreed` says nothing of at its top, such as the hash of a plugin, is left to other checks.
    """
    before = dict(flat(agreed))
    now = {key: v for key, v in flat(asked) if key.partition(".")[0] in agreed}
    return [
        f"{key}: agreed {_shown(before, key)}, asked {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if _shown(before, key) != _shown(now, key)
    ]


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key])[:100] if key in values else NOWHERE
