"""Who takes part in a run, and what each holds."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from coterie.adapters import detach
from coterie.aggregation.defaults import check_once
from coterie.aggregation.hooks import encoded_schema, run_hook
from coterie.aggregation.optimiser import ServerOptimiser
from coterie.aggregation.transform import Reduction, TransformFacts
from coterie.bases import Base, BaseSpec, Tokenizer, load_base, load_tokenizer
from coterie.config.run import RunConfig
from coterie.data.chat import chat_template
from coterie.data.divide import Division, divided_texts
from coterie.data.kinds.text import Tokens
from coterie.data.quality import without_held_out
from coterie.data.split import Split
from coterie.data.texts import Texts, client_texts, whole_text
from coterie.data.tokens import ClientData, encoded, pooled, tokenise
from coterie.errors import CoterieError
from coterie.federation.reading import PUBLIC, Reading
from coterie.methods.contract import SERVER, Log, RunFacts, ServerContext
from coterie.privacy.ledger import Ledger
from coterie.training.context import ClientContext, ClientId

EVERYONE = "everyone"
"""The name of the one client of a pooled federation."""

HELD_OUT = ("validation", "test")
NOTHING = Tokens(torch.zeros(0, dtype=torch.int32), 0)


@dataclass(frozen=True)
class Participant:
    """One client: its data, and the texts that its model is scored on, by the name in tables."""

    name: ClientId
    data: ClientData
    tests: dict[ClientId, Split]
    public: Split | None = None
    """The text that everybody may see, where the run has one."""
    labels: Mapping[str, int] | None = None
    """Where labelled texts were divided: records of each label in its training text (uncut)."""
    base: Base | None = None
    """Loaded, where it may be another than the run's."""

    def digest(self) -> str:
        """A hash of all tokens, to notice that files changed between two parts of a run."""
        splits = (self.data.train, self.data.validation, *self.tests.values(), self.public)
        return digest_of(filter(None, splits))

    def described(self) -> dict[str, Any]:
        """What the run folder records of this client: the digest, and counts."""
        splits: dict[str, Split] = vars(self.data)
        counts = {split: tokens.counts() for split, tokens in splits.items()}
        described: dict[str, Any] = {
            "data": self.digest(),
            "tokens": {split: len(tokens.ids) for split, tokens in splits.items()},
        }
        for key in dict.fromkeys(key for own in counts.values() for key in own):
            described[key] = {split: own[key] for split, own in counts.items() if key in own}
        if self.labels is not None:
            described["labels"] = dict(self.labels)
        return described


def digest_of(splits: Iterable[Split]) -> str:
    """A hash of all tokens, and of what makes samples of them."""
    digest = blake2b(digest_size=8)
    for tokens in splits:
        for part in tokens.digested():
            digest.update(part)
    return digest.hexdigest()


def text_digest(text: Split, window: int) -> str:
    """Return a hash of a text and its windows; scores by window are comparable if it is equal."""
    return f"{digest_of([text])}-{window}"


@dataclass(frozen=True)
class Federation:
    """Who takes part: clients by name, or the one of a pooled run; a server that has a model."""

    clients: list[Participant]
    server: Participant | None = None


Look = Callable[[Reading], None]
"""Looks at what was read; texts are not kept."""


def participants_of(
    config: RunConfig, tokenizer: Tokenizer, look: Look = lambda _: None
) -> list[Participant]:
    """All clients of a run, sorted by name, or the one that holds everything if it is pooled."""
    return gathered(config, tokenizer, look).clients


def gathered(
    config: RunConfig,
    tokenizer: Tokenizer,
    look: Look = lambda _: None,
    begin: Callable[[str], None] = lambda _: None,
) -> Federation:
    """Everybody who takes part in a run, each with texts in the tokens of its own base.

    `tokenizer` is that of the run's base. `begin` is told what begins, such as "Reading". Raises
    CoterieError if a text cannot be read or does not suffice.
    """
    begin("Reading")
    if config.divide is None:
        own = {
            c.name: client_texts(c, config.data, config.root, config.seed) for c in config.clients
        }
        division = Division(own, {})
    else:
        division = divided_texts(config.divide, config.data, config.root, config.seed)
    names = sorted(division)
    others = [EVERYONE] * config.pooled + [SERVER] * (config.server is not None)
    tokenizers = _tokenizers(config, tokenizer, [*names, *others])
    texts: dict[ClientId, Texts[Any]] = {}
    data: dict[ClientId, ClientData] = {}
    removed: dict[ClientId, int] = {}
    for number, name in enumerate(names, start=1):
        begin(f"Tokenising {name} ({number} of {len(names)})")
        texts[name], removed[name] = division[name], 0
        if config.data.deduplicate:
            texts[name], removed[name] = without_held_out(division[name], f"Client {name}")
        data[name] = tokenise(texts[name], tokenizers[name], config.data.of(name), name)
    tests = {name: getattr(data[name], config.evaluation.split) for name in names}
    set_aside = division.public
    shared = _public_items(config, set_aside)
    public = _public(config, tokenizers, shared)
    look(Reading(texts, data, removed, division.labels, tokenizers, shared or (), public[names[0]]))
    server = None
    if config.server is not None:
        server = _server(config, tokenizers[SERVER], public[SERVER], set_aside)
    if config.pooled:
        both = pooled(list(data.values()), None if set_aside is None else public[EVERYONE])
        return Federation([Participant(EVERYONE, both, tests, public[EVERYONE])], server)
    clients = [
        Participant(name, data[name], {name: tests[name]}, public[name], division.labels.get(name))
        for name in names
    ]
    return Federation(clients, server)


def served(config: RunConfig) -> Participant | None:
    """What a server with a model of its own holds in a deployment, with its base.

    None where it has none. Raises CoterieError as `gathered` does, or for a base that is not there.
    """
    if config.server is None:
        return None
    precision, window = config.training.precision, config.data.window
    base = load_base(config.base_of(SERVER), precision, window, config.root, config.device)
    public = _public(config, {SERVER: base.tokenizer}, _public_items(config, None))
    own = _server(config, base.tokenizer, public[SERVER], None)
    return replace(own, base=base)


def _tokenizers(
    config: RunConfig, tokenizer: Tokenizer, names: Sequence[str]
) -> dict[str, Tokenizer]:
    """Each one's tokenizer; those of the same base are one."""
    found = {config.base: tokenizer}
    for name in names:
        base = config.base_of(name)
        if base not in found:
            try:
                found[base] = load_tokenizer(base, config.root)
            except CoterieError as error:
                raise CoterieError(f"The base of {name}: {error}") from error
    return {name: found[config.base_of(name)] for name in names}


def _public_items(config: RunConfig, set_aside: Texts[Any] | None) -> list[Any] | None:
    """The documents or samples that everybody may see, where the run has any."""
    if set_aside is not None:
        return set_aside.train
    if config.data.public is None:
        return None
    return whole_text(config.data.public, config.data, config.root, PUBLIC)


def _public(
    config: RunConfig, tokenizers: Mapping[str, Tokenizer], items: list[Any] | None
) -> Mapping[str, Split | None]:
    """The text that everybody may see, for each of `tokenizers`."""
    if items is None:
        return dict.fromkeys(tokenizers)
    bases = {config.base_of(name): tokenizer for name, tokenizer in tokenizers.items()}
    tokens = {b: encoded(items, t, config.data, "public", PUBLIC) for b, t in bases.items()}
    return {name: tokens[config.base_of(name)] for name in tokenizers}


def public_digest(config: RunConfig) -> str | None:
    """A hash of the text of `data.public`, by which machines find out that they have the same."""
    if (items := _public_items(config, None)) is None:
        return None
    digest = blake2b(digest_size=16)
    for item in items:
        digest.update(json.dumps(_plain(item)).encode())
    return digest.hexdigest()


def described_templates(
    config: RunConfig, tokenizers: Mapping[BaseSpec, Tokenizer]
) -> dict[str, dict[str, dict[str, str]]]:
    """What a run folder records of chat templates, by base, where the run uses them."""
    if not config.data.chats:
        return {}
    found = {b.name: chat_template(t, config.data.chat_template) for b, t in tokenizers.items()}
    told = {base: {"name": t.name, "hash": t.digest} for base, t in found.items()}
    return {"chat_templates": told}


def _plain(item: Any) -> Any:
    """A text or sample without the place that it was read from, which differs by machine, and
    without the fields that its prompt was made from."""
    if isinstance(item, str):
        return item
    return {key: value for key, value in vars(item).items() if key not in ("where", "fields")}


def _server(
    config: RunConfig, tokenizer: Tokenizer, public: Split | None, set_aside: Texts[Any] | None
) -> Participant:
    """The server trains on the public text. Without a text to be scored on, it has no tests."""
    assert config.server is not None
    items: dict[str, list[Any]] = {}
    if config.server.test is not None:
        path, owner = config.server.test, "The server: its test text"
        items = dict.fromkeys(HELD_OUT, whole_text(path, config.data, config.root, owner))
    elif set_aside is not None and set_aside.test:
        items = {split: getattr(set_aside, split) for split in HELD_OUT}
    held_out = {
        split: encoded(part, tokenizer, config.data, split, f"The server: its {split} text")
        for split, part in items.items()
    }
    tests = {SERVER: held_out[config.evaluation.split]} if held_out else {}
    train = NOTHING if public is None else public
    data = ClientData(train, *(held_out.get(split, NOTHING) for split in HELD_OUT))
    return Participant(SERVER, data, tests, public)


def client_context(
    config: RunConfig,
    base: Base,
    participant: Participant,
    log: Log,
    ledger: Ledger | None = None,
) -> ClientContext:
    """What the client side of the run's method is given.

    `base` is its own; an earlier run's adapter is taken out of it, as adapters are built on what a
    bare base has. A step of the one client of a pooled federation sees as much text as a step of
    all clients.
    """
    detach(base.model)
    training = config.training_of(participant.name)
    batch = training.batch * max(1, len(participant.tests))
    return ClientContext(
        name=participant.name,
        seed=config.seed,
        base=base,
        data=participant.data,
        window=config.data.window,
        training=training.model_copy(update={"batch": batch}),
        rounds=config.rounds,
        log=log,
        public=participant.public,
        ledger=ledger or Ledger(),
    )


def server_context(
    config: RunConfig,
    base: nn.Module,
    clients: Sequence[ClientId],
    own: Participant | None,
    log: Log,
) -> ServerContext:
    """What the server side of the run's method is given; `own` is what a server of its own model
    holds, with its base. Any adapter is taken out of `base`."""
    detach(base)
    context = None
    if own is not None:
        assert own.base is not None, "a server with a model of its own needs its weights"
        context = client_context(config, own.base, own, log)
    return ServerContext(config.seed, base, tuple(sorted(clients)), log, config.training, context)


def check(config: RunConfig, clients: Sequence[ClientId], public: bool) -> None:
    """Raise CoterieError if the run's method cannot run with these clients and their bases."""
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
    method, theirs = config.method, {*bases.values()}
    if not config.pooled and theirs != {config.base} and not method.mixes_bases:
        told = ", ".join(f"{name}: {base}" for name, base in bases.items())
        raise CoterieError(
            f"{method.name} needs one base, the run's, for all clients, but they have {told}; "
            "set `base` and remove `bases`, or use a method that shares nothing, such as "
            "local."
        )
    kind = config.data.declared
    if kind.compares and not method.learns_preferences:
        raise CoterieError(
            f"The method {method.name!r} does not learn {kind.name}; remove {config.data.key}, or "
            "use another method, such as comigs-1g1s."
        )
    instructions = "answers" in kind.offers and not config.data.chats
    check_transforms(config, clients)
    method.check(
        RunFacts(
            tuple(clients),
            public,
            bases,
            config.server is not None,
            instructions,
            config.training.optimiser.name,
            any(isinstance(t, ServerOptimiser) for t in config.every_transform),
        )
    )


def check_transforms(config: RunConfig, clients: Sequence[ClientId]) -> None:
    """Raise CoterieError if a transform of the run cannot be part of it."""
    every, method = config.every_transform, config.method
    check_once(config.transforms, every)
    schema = method.schema()
    reduction = next((t for t in every if isinstance(t, Reduction)), None)
    if reduction and any(field.name == "residual" for field in schema.down):
        raise CoterieError(
            f"`exact: true` sends what makes means exact, and {reduction.name} replaces the mean; "
            "remove one of them."
        )
    exchanges = method.exchanges(config.rounds)
    for transform in every:
        decoded = isinstance(transform, Reduction) and not transform.sealed
        seen = method.schema() if decoded else schema
        facts = TransformFacts(tuple(clients), method.name, seen, exchanges)
        run_hook(transform, "check", facts)
        schema = encoded_schema(transform, schema)


def _check_names(key: str, named: Iterable[str], known: Sequence[str]) -> None:
    for name in named:
        if name not in known:
            raise CoterieError(
                f"{key} names the unknown client {name!r} (known: {', '.join(known)}); correct "
                "or remove it."
            )
