"""What a person reads before agreeing to a run of a server."""

import json

from coterie.config import RunConfig
from coterie.deployment.costs import MOST_DISK
from coterie.deployment.terms import flat
from coterie.errors import plural
from coterie.messages.envelope import Order


def in_words(order: Order, config: RunConfig, memory: int | None = None) -> list[tuple[str, str]]:
    """Return what a person should know before agreeing to a run, as (subject, text) pairs.

    memory: see `costs_in_words`.
    """
    method, schema, training = config.method, config.method.schema(), config.training
    settings = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in flat(method.described())
        if key != "name"
    ]
    told = {
        "run": config.name,
        "method": f"{method.name}: {method.summary}",
        "settings": ", ".join(settings),
        "training": f"{plural(config.rounds, 'round')} of {plural(training.steps, 'step')} of "
        f"{plural(training.batch, 'sample')}",
        **costs_in_words(config, memory),
        "base": str(config.base),
        "sent once": "; ".join(field.what for field in schema.hello),
        "every round": "; ".join(field.what for field in schema.up),
        "losses": "sent, with all other metrics"
        if config.deployment.share_metrics
        else "stay here",
        "public text": order.public or "",
        "plugin": "" if order.plugin is None else f"{order.plugin.file} {order.plugin.sha256[:16]}",
    }
    return [(what, text) for what, text in told.items() if text]


def costs_in_words(config: RunConfig, memory: int | None = None) -> dict[str, str]:
    """Return what a person should know of the costs before agreeing to a run, by subject.

    memory: estimated bytes of the client's process on a CPU; None if there is no estimate.
    """
    estimate = "" if memory is None else f"about {memory / 1e9:,.1f} GB on a CPU: "
    training, evaluation = config.training, config.evaluation
    steps = training.steps * config.exchanges
    every = "after the last round"
    if evaluation.every is not None:
        every = "every round" if evaluation.every == 1 else f"every {evaluation.every} rounds"
    return {
        "computing": f"{steps:,} training steps in all, with "
        f"{config.threads or 'the default number of'} threads; scored {every}",
        "memory": f"{estimate}{training.at_once} samples of {config.data.window} tokens at once in "
        f"training, {evaluation.batch} in scoring; `coterie client --check` measures it",
        "disk": "two checkpoints of the trained parameters, and the score of each test window; at "
        f"most {MOST_DISK / 2**30:.0f} GiB for all runs in one folder",
    }
