"""Statements on what a client sends in a run, what reaches other clients, and what noise protects.

Consent prompts, audits and model cards show these statements. They are derived from the schemas and
the privacy budgets of the run's method and transforms, and from nothing else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from coterie.config.run import RunConfig
from coterie.federation.pipeline import budgets_of, pipeline_of
from coterie.messages import Field, Schema
from coterie.privacy.ledger import Budget, together
from coterie.training.spec import ReplaySpec

SENT, FORWARDED, AVERAGED, COMPUTED, LIMIT, SEEN, PRIVACY, GENERAL = (
    "sent to the server",
    "passed on to other clients",
    "in means with others",
    "used for other clients",
    "limit on means",
    "seen by the server",
    "privacy",
    "general samples",
)
"""The subjects of the statements."""


class Statement(NamedTuple):
    """A fact about a run that a client needs to know before it agrees to the run."""

    subject: str
    text: str


def statements(config: RunConfig) -> list[Statement]:
    """Return what a client sends in a run, what reaches other clients, and what noise protects."""
    schema = config.method.schema()
    encoded = pipeline_of(config).schema  # with the values that transforms add
    texts = {
        SENT: "\n".join(_listed(encoded.described())) or "nothing",
        FORWARDED: "; ".join(_listed(encoded.forwarded())) or "nothing",
        AVERAGED: "; ".join(_averaged(schema)),
        COMPUTED: "; ".join(_computed(schema)),
        LIMIT: _limit(schema, config.aggregation.least_others),
        SEEN: _seen(config) if schema.up else "",
        PRIVACY: _noise(budgets_of(config)),
        GENERAL: _general(config),
    }
    return [Statement(subject, text) for subject, text in texts.items() if text]


def protection(config: RunConfig) -> list[Statement]:
    """Return the statements on what reaches other clients, and on what noise protects.

    Their texts have one line each.
    """
    return [statement for statement in statements(config) if statement.subject != SENT]


def _listed(descriptions: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the descriptions of fields in one text for each frequency with which they are sent."""
    return (f"{when}: {'; '.join(texts)}" for when, texts in descriptions.items())


def _averaged(schema: Schema) -> dict[str, None]:
    """Return the descriptions of fields that clients receive as means, as dictionary keys."""
    received = {field.name for field in schema.down if not field.peers}
    fields = (field for field in schema.up if field.name in schema.averaged & received)
    return dict.fromkeys(field.description for field in fields)


def _limit(schema: Schema, least_others: int) -> str:
    """Return a text on the minimum number of other clients in a mean."""
    if not (_averaged(schema) or any(_computed(schema))):
        return ""
    if least_others > 1:
        return f"each mean contains the values of at least {least_others} other clients"
    return "none: from a mean of few clients, another client can compute what this one sends"


def _computed(schema: Schema) -> Iterator[str]:
    """Yield texts on the fields from which the server computes other values that clients receive.

    Clients receive these fields of other clients neither individually nor in means.
    """
    elsewhere = schema.averaged & {field.name for field in schema.down if not field.peers}
    elsewhere |= {name for field in schema.down if field.peers for name in field.sources}
    uses: dict[tuple[str, ...], dict[str, None]] = {}
    for field in schema.up:
        results = [f for f in schema.down if not f.peers and field.name in f.sources]
        if results and field.name not in elsewhere:
            key = tuple(f.description for f in results if f.description != field.description)
            uses.setdefault(key, {})[_short(field)] = None
    for results, sources in uses.items():
        purpose = f" (to compute {' and '.join(results)})" if results else ""
        yield "; ".join(sources) + purpose


def _short(field: Field) -> str:
    """Return the description of a field without the details that follow a colon."""
    return field.description.partition(":")[0]


def _seen(config: RunConfig) -> str:
    """Return a text on whether the server can read the values of single clients."""
    schema, sealed = config.method.schema(), [t for t in config.transforms if t.sealed]
    if not sealed:
        return "each client's values"
    hidden = {name for transform in sealed for name in transform.covered(schema)}
    names = ", ".join(transform.name for transform in sealed)
    single = dict.fromkeys(_short(field) for field in schema.up if field.name not in hidden)
    rest = f"; each client's {'; '.join(single)}" if single else ""
    return f"only results for all clients together ({names}){rest}"


def _general(config: RunConfig) -> str:
    """Return a text on the general samples that clients read in training, or "" without replay."""
    spec = config.training.replay
    if not isinstance(spec, ReplaySpec):
        return ""
    sources = {"list": "Coterie's list of requests and texts", "sampled": "texts by the base"}
    source = sources.get(str(spec.text), "the requests and texts in training.replay.text")
    return f"{source}, with the base's predictions, which stay on the client"


def _noise(budgets: Sequence[Budget]) -> str:
    """Return a text on what noise is added to, and on what has no noise."""
    noisy = [budget for budget in budgets if math.isfinite(budget.epsilon)]
    total = together(noisy)
    if total is None:
        return "no noise is added to anything"
    parts = [f"{budget.description} ({_guarantee(budget)})" for budget in noisy]
    sums = f", {_guarantee(total)} together" if len(noisy) > 1 else ""
    bare = " and ".join(budget.description for budget in budgets if budget not in noisy)
    rest = f"anything else, such as {bare}" if bare else "anything else"
    return f"noise is added to {' and '.join(parts)}{sums}; no noise is added to {rest}"


def _guarantee(budget: Budget) -> str:
    return f"epsilon {budget.epsilon:.3g} and delta {budget.delta:g} for the whole run"
