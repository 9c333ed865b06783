"""Checks that a run's method and transforms work with its clients."""

from collections.abc import Iterable, Sequence

from coterie.aggregation.transform import Reduction, TransformFacts
from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.methods.contract import SERVER, RunFacts
from coterie.training.context import ClientId


def check(config: RunConfig, clients: Sequence[ClientId], public: bool) -> None:
    """Check that the run's method and transforms work with its clients and their bases.

    Args:
        config: The run.
        clients: The names of the clients; in a pooled run, of its one client.
        public: Whether the run has a public text.

    Raises:
        CoterieError: The run is impossible; the message names the keys to change.
    """
    if config.server is not None and SERVER in clients:
        raise CoterieError(
            f"A client is named {SERVER!r}, the name reserved for the server's model; rename "
            "the client."
        )
    if not config.pooled:
        trained = clients if config.server is None else [*clients, SERVER]
        _check_names("bases", config.bases, clients)
        _check_names("data.limits_of", config.data.limits_of, clients)
        _check_names("training.learning_rates", config.training.learning_rates, trained)
    bases = {name: config.base_of(name) for name in clients}
    method, distinct = config.method, {*bases.values()}
    if not config.pooled and distinct != {config.base} and not method.mixes_bases:
        listed = ", ".join(f"{name}: {base}" for name, base in bases.items())
        raise CoterieError(
            f"{method.name} needs the run's base ({config.base}) on all clients, but `bases` "
            f"gives {listed}; remove `bases`, or use a method that shares nothing, such as local."
        )
    kind = config.data.declared
    if kind.compares and not method.learns_preferences:
        raise CoterieError(
            f"The method {method.name!r} does not learn {kind.name}; remove {config.data.key}, or "
            "use a method that does, such as comigs-1g1s."
        )
    instructions = "answers" in kind.offers and not config.data.chats
    if config.aggregation.optimiser is not None and not method.schema().reduced("mean"):
        raise CoterieError(
            f"aggregation.optimiser has no effect with the method {method.name!r}, whose server "
            "computes no mean; remove it."
        )
    check_transforms(config, clients)
    method.check(
        RunFacts(
            tuple(clients),
            public,
            bases,
            config.server is not None,
            instructions,
            config.training.optimiser.name,
            config.aggregation.optimiser is not None,
        )
    )


def check_transforms(config: RunConfig, clients: Sequence[ClientId]) -> None:
    """Check that the run's transforms work with its method and with each other.

    Args:
        config: The run.
        clients: The names of the clients.

    Raises:
        CoterieError: A transform cannot be part of the run.
    """
    reductions = [t.name for t in config.transforms if isinstance(t, Reduction)]
    if len(reductions) > 1:
        raise CoterieError(
            "aggregation.transforms has several transforms that replace the mean "
            f"({', '.join(reductions)}); keep one of them."
        )
    schema = config.method.schema()
    if reductions and any(field.name == "residual" for field in schema.down):
        raise CoterieError(
            "method.exact needs the mean of uploads, which the transform "
            f"{reductions[0]} replaces; remove `exact: true` or the transform."
        )
    weights, exchanges = config.aggregation.weights, config.method.exchanges(config.rounds)
    for transform in config.transforms:
        decoded = isinstance(transform, Reduction) and not transform.sealed
        input_schema = config.method.schema() if decoded else schema
        transform.check(
            TransformFacts(tuple(clients), config.method.name, input_schema, weights, exchanges)
        )
        schema = transform.schema(schema)


def _check_names(key: str, names: Iterable[str], clients: Sequence[str]) -> None:
    for name in names:
        if name not in clients:
            raise CoterieError(
                f"{key} names the unknown client {name!r} (clients: {', '.join(clients)}); correct "
                "or remove it."
            )
