"""Who takes part in a run, and what each holds."""

from dataclasses import dataclass
from hashlib import blake2b

from coterie.base import Base, Tokenizer
from coterie.config import RunConfig
from coterie.data import (
    ClientData,
    Tokens,
    client_texts,
    divided_texts,
    pooled,
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
    tests: dict[ClientId, Tokens]

    def digest(self) -> str:
        """A hash of all tokens, to notice that files changed between two parts of a run."""
        digest = blake2b(digest_size=8)
        splits = (self.data.train, self.data.validation, *self.tests.values())
        for tokens in splits:
            digest.update(tokens.ids.numpy().tobytes())
        return digest.hexdigest()


def client_data(config: RunConfig, tokenizer: Tokenizer, name: ClientId) -> ClientData:
    """The data of one client of `clients`, from nothing but its own files."""
    for client in config.clients:
        if client.name == name:
            texts = client_texts(client, config.data, config.root, config.seed)
            return tokenise(texts, tokenizer, config.data, name)
    raise CoterieError(f"The run file names no client {name!r}.")


def federation(config: RunConfig, tokenizer: Tokenizer) -> list[Participant]:
    """All clients of a run, sorted by name, or the one that holds everything if it is pooled."""
    if config.divide is not None:
        divided = divided_texts(config.divide, config.data, config.root, config.seed)
        data = {n: tokenise(t, tokenizer, config.data, n) for n, t in divided.items()}
    else:
        data = {c.name: client_data(config, tokenizer, c.name) for c in config.clients}
    tests = {name: data[name].test for name in sorted(data)}
    if config.pooled:
        return [Participant(EVERYONE, pooled(list(data.values())), tests)]
    return [Participant(name, data[name], {name: tests[name]}) for name in sorted(data)]


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
    )
