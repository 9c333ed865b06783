"""Checks that a run's method and transforms work with the run's clients."""

from collections.abc import Iterable, Sequence

from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.methods.contract import SERVER, Method, RunFacts
from coterie.training.context import ClientId
from coterie.transforms.contract import Reduction, Transform, TransformFacts
from coterie.transforms.hooks import encoded_schema, run_hook
from coterie.turn import TRAIN


def check(config: RunConfig, clients: Sequence[ClientId], public: bool) -> None:
    """Check that a run's method and transforms work with the run's clients and their bases.

    Args:
        config: The run's configuration.
        clients: The names of the clients. A pooled run has only one client, which trains on the
            data of all clients together.
        public: Whether the run has public data.

    Raises:
        CoterieError: The run is invalid. The message names the settings in the run file that must
            be changed.
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
            f"The method {method.name!r} needs the run's base ({config.base}) on all clients, but "
            f"the clients have {listed}; set `base` and remove `bases`, or use a method that "
            "shares nothing, such as local."
        )
    kind = config.data.declared
    if kind.compares and not method.learns_preferences:
        raise CoterieError(
            f"The method {method.name!r} cannot train on {kind.name}; remove {config.data.key}, or "
            "use a method that can, such as comigs-1g1s."
        )
    instructions = "answers" in kind.offers and not config.data.chats
    check_transforms(config, clients)
    _check_means(method, config.aggregation.least_others, len(clients))
    method.check(
        RunFacts(
            tuple(clients),
            public,
            bases,
            config.server is not None,
            instructions,
            config.training.optimiser.name,
            config.aggregation.optimiser is not None,
            config.aggregation.weights == "tokens",
            config.aggregation.least_others,
        )
    )


def check_transforms(config: RunConfig, clients: Sequence[ClientId]) -> None:
    """Check that a run's transforms work with the run's method and with each other.

    Args:
        config: The run.
        clients: The names of the clients.

    Raises:
        CoterieError: A transform does not work with the method or with another transform.
    """
    transforms, method = config.transforms, config.method
    _check_once(transforms)
    schema = method.schema()
    reduction = next((t for t in transforms if isinstance(t, Reduction)), None)
    if reduction and any(field.name == "residual" for field in schema.down):
        raise CoterieError(
            f"method.exact needs the mean of uploads, which the transform {reduction.name!r} "
            "replaces; remove `exact: true` or the transform."
        )
    for transform in transforms:
        decoded = isinstance(transform, Reduction) and not transform.sealed
        input_schema = method.schema() if decoded else schema
        facts = TransformFacts(tuple(clients), method.name, input_schema, config.exchanges)
        run_hook(transform, "check", facts)
        schema = encoded_schema(transform, schema)
    if config.aggregation.optimiser and not method.schema().reduced("mean"):
        raise CoterieError(
            f"aggregation.optimiser has no effect with the method {method.name!r}, "
            "whose server computes no mean over all clients. Remove it, or choose another "
            "method."
        )


def _check_once(transforms: Sequence[Transform]) -> None:
    """Check that no transform or phase occurs twice, and that at most one transform is a reduction.

    The phases are the training phase, and the phases that transforms add with the attributes
    `before` and `after`.
    """
    reductions = [t.name for t in transforms if isinstance(t, Reduction)]
    if len(set(reductions)) > 1:
        raise CoterieError(
            "aggregation.transforms has several transforms that replace the mean "
            f"({', '.join(reductions)}); keep one of them."
        )
    if phase := _repeated([TRAIN, *(p for t in transforms for p in (*t.before, *t.after))]):
        raise CoterieError(
            f"Two phases have the name {phase!r}. A phase in the attribute `before` or `after` of "
            "a transform needs a name that is not `train` (the training phase) and is not used "
            "again in any of these attributes; rename the phase in one transform."
        )
    if name := _repeated([transform.name for transform in transforms]):
        raise CoterieError(f"aggregation.transforms has {name!r} twice; keep one of them.")


def _repeated(names: Sequence[str]) -> str | None:
    """Return the first name that repeats an earlier one, or None."""
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


def _check_means(method: Method, least_others: int, clients: int) -> None:
    """Check that means with at least `least_others` other clients can be computed, if required."""
    schema = method.schema()
    if least_others == 1 or not schema.up:
        return
    if clients <= least_others:
        raise CoterieError(
            f"aggregation.least_others is {least_others}, but the run has only {clients} clients; "
            "choose a smaller number."
        )
    single = [f for f in schema.up if f.dtype != "json" and f.name not in schema.averaged]
    single += [f for f in schema.down if f.name == "residual"]
    if single:
        raise CoterieError(
            f"aggregation.least_others limits means only, but the server of the method "
            f"{method.name!r} also uses {single[0].name!r} ({single[0].description}) of single "
            "clients; remove the setting, or choose another method."
        )


def _check_names(key: str, names: Iterable[str], clients: Sequence[str]) -> None:
    for name in names:
        if name not in clients:
            raise CoterieError(
                f"{key} names the unknown client {name!r} (clients: {', '.join(clients)}); correct "
                "or remove the name."
            )
