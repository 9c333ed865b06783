"""Who takes part in a run, and what each holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from coterie.base import Base, Tokenizer
from coterie.config import RunConfig
from coterie.data import (
    ClientData,
    Examples,
    Split,
    client_texts,
    divided_texts,
    pooled,
    public_tokens,
    tokenise,
)
from coterie.errors import CoterieError
from coterie.methods import ClientContext, ClientId
from coterie.methods.base import Log

EVERYONE = "everyone"
"""The name of the one client of a pooled federation."""


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

    def digest(self) -> str:
        """A hash of all tokens, to notice that files changed between two parts of a run."""
        digest = blake2b(digest_size=8)
        splits = (self.data.train, self.data.validation, *self.tests.values(), self.public)
        for tokens in filter(None, splits):
            digest.update(tokens.ids.numpy().tobytes())
            if isinstance(tokens, Examples):
                digest.update(tokens.starts.numpy().tobytes())
                digest.update(tokens.answers.numpy().tobytes())
                digest.update(repr([item.choices for item in tokens.items]).encode())
        return digest.hexdigest()

    def described(self) -> dict[str, Any]:
        """What the run folder records of this client: the digest, and counts."""
        splits: dict[str, Split] = vars(self.data)
        samples = {split: e for split, e in splits.items() if isinstance(e, Examples)}
        described: dict[str, Any] = {
            "data": self.digest(),
            "tokens": {split: len(tokens.ids) for split, tokens in splits.items()},
        }
        if samples:
            described["samples"] = {split: len(e) for split, e in samples.items()}
            described["too_long"] = {split: e.too_long for split, e in samples.items()}
        if self.labels is not None:
            described["labels"] = dict(self.labels)
        return described


def client_data(config: RunConfig, tokenizer: Tokenizer, name: ClientId) -> ClientData:
    """The data of one client of `clients`, from nothing but its own files."""
    for client in config.clients:
        if client.name == name:
            texts = client_texts(client, config.data, config.root, config.seed)
            return tokenise(texts, tokenizer, config.data, name)
    raise CoterieError(f"The run file names no client {name!r}.")


def federation(config: RunConfig, tokenizer: Tokenizer) -> list[Participant]:
    """All clients of a run, sorted by name, or the one that holds everything if it is pooled."""
    labels: Mapping[ClientId, Mapping[str, int]] = {}
    if config.divide is not None:
        divided = divided_texts(config.divide, config.data, config.root, config.seed)
        labels = divided.labels
        data = {n: tokenise(t, tokenizer, config.data, n) for n, t in divided.items()}
    else:
        data = {c.name: client_data(config, tokenizer, c.name) for c in config.clients}
    tests = {name: getattr(data[name], config.evaluation.split) for name in sorted(data)}
    public = public_tokens(config.data, config.root, tokenizer)
    if config.pooled:
        return [Participant(EVERYONE, pooled(list(data.values())), tests, public)]
    return [
        Participant(name, data[name], {name: tests[name]}, public, labels.get(name))
        for name in sorted(data)
    ]


def client_context(
    config: RunConfig, base: Base, participant: Participant, log: Log
) -> ClientContext:
    """What the client side of the run's method is given.

    A step of the one client of a pooled federation sees as much text as a step of all clients.
    """
    batch = config.training.batch * len(participant.tests)
    return ClientContext(
        name=participant.name,
        seed=config.seed,
        base=base,
        data=participant.data,
        window=config.data.window,
        training=config.training.model_copy(update={"batch": batch}),
        rounds=config.rounds,
        log=log,
        public=participant.public,
    )
