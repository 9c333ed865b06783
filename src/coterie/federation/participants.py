"""The participants of a run, the participants' data, and the contexts that methods receive."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from coterie.adapters import detach
from coterie.bases import Base, BaseSpec, Tokenizer, load_base, load_tokenizer
from coterie.config.run import RunConfig
from coterie.data.chat import chat_template
from coterie.data.division.divide import Division, divided_texts
from coterie.data.kinds.text import Tokens
from coterie.data.split import Split
from coterie.data.texts import Texts, client_texts, whole_text
from coterie.data.tokens import ClientData, encoded, pooled, tokenise
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate
from coterie.evaluation.quality import without_held_out
from coterie.federation.reading import PUBLIC, Reading
from coterie.methods.contract import SERVER, Log, ServerContext
from coterie.privacy.ledger import Ledger
from coterie.training.context import ClientContext, ClientId
from coterie.training.general import GeneralSamples, Replay

EVERYONE = "everyone"
"""The name of the only client in a pooled run; it has the data of all clients."""

HELD_OUT = ("validation", "test")
NOTHING = Tokens(torch.zeros(0, dtype=torch.int32), 0)
"""An empty text."""


@dataclass(frozen=True)
class Participant:
    """A participant of a run (a client, or a server that has its own model), with its data."""

    name: ClientId
    """The client's name; `everyone` for the client of a pooled run, `server` for the server."""
    data: ClientData
    """The training, validation and test text as tokens."""
    tests: dict[ClientId, Split]
    """The texts on which the participant's model is scored; the keys are the owners' names."""
    public: Split | None = None
    """The public text, if the run has one."""
    labels: Mapping[str, int] | None = None
    """The number of records per label in the training text, before limits apply.

    None unless the run divided labelled texts among the clients.
    """
    base: Base | None = None
    """The participant's own loaded base; None if the participant uses the run's base."""
    replay: Replay | None = None
    """General samples for training; None if the run has none, or before they are made."""
    held_out: GeneralSamples | None = None
    """General samples on which drift is measured; None in the same cases."""
    gate: Gate | None = None
    """Decides which prompts the client's model answers; None if it answers all prompts."""

    def digest(self) -> str:
        """Return a hexadecimal hash of all tokens of the participant's data.

        A different hash shows that the data files have changed since the run began.
        """
        splits = (self.data.train, self.data.validation, *self.tests.values(), self.public)
        return digest_of(filter(None, splits))

    def described(self) -> dict[str, Any]:
        """Describe the participant for the run folder.

        Returns:
            The digest of the data, each split's tokens and `Split.counts`, and any labels.
        """
        splits: dict[str, Split] = vars(self.data)
        counts = {split: tokens.counts() for split, tokens in splits.items()}
        described: dict[str, Any] = {
            "data": self.digest(),
            "tokens": {split: len(tokens.ids) for split, tokens in splits.items()},
        }
        for unit in dict.fromkeys(unit for count in counts.values() for unit in count):
            described[unit] = {split: c[unit] for split, c in counts.items() if unit in c}
        if self.labels is not None:
            described["labels"] = dict(self.labels)
        return described


def digest_of(splits: Iterable[Split]) -> str:
    """Hash the tokens of splits and the boundaries between samples.

    Args:
        splits: The splits. The order of the splits affects the hash.

    Returns:
        A hexadecimal hash.
    """
    digest = blake2b(digest_size=8)
    for split in splits:
        for data in split.digested():
            digest.update(data)
    return digest.hexdigest()


def text_digest(text: Split, window: int) -> str:
    """Return a string that identifies a text and the length of its windows.

    The scores of two runs can be compared window by window if the two runs' strings are equal.

    Args:
        text: The text.
        window: The number of tokens that the model predicts in each window.

    Returns:
        The hexadecimal hash of the text, a hyphen, and the length of the windows.
    """
    return f"{digest_of([text])}-{window}"


@dataclass(frozen=True)
class Federation:
    """The participants of a run."""

    clients: list[Participant]
    """The clients, sorted by name; in a pooled run, one client with the data of all clients."""
    server: Participant | None = None
    """The server if the server has its own model, else None."""


Inspect = Callable[[Reading], None]
"""A function that inspects the clients' texts before the texts are discarded."""


def gathered(
    config: RunConfig,
    tokenizer: Tokenizer,
    inspect: Inspect = lambda _: None,
    begin: Callable[[str], None] = lambda _: None,
) -> Federation:
    """Read the data of all participants of a run.

    Each participant's texts are tokenised with the tokenizer of the participant's base.

    Args:
        config: The run.
        tokenizer: The tokenizer of the run's base.
        inspect: Called once with all clients' texts.
        begin: Called at the start of each stage with the stage's description, such as "Reading".

    Returns:
        The clients, and the server if the server has its own model.

    Raises:
        CoterieError: A text cannot be read or is too short.
    """
    begin("Reading")
    if config.divide is None:
        files = {
            c.name: client_texts(c, config.data, config.root, config.seed) for c in config.clients
        }
        division = Division(files, {})
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
    items = _public_items(config, set_aside)
    public = _public(config, tokenizers, items)
    first = public[names[0]]
    inspect(Reading(texts, data, removed, division.labels, tokenizers, items or (), first))
    server = None
    if config.server is not None:
        server = _server(config, tokenizers[SERVER], public[SERVER], set_aside)
    if config.pooled:
        together = pooled(list(data.values()), None if set_aside is None else public[EVERYONE])
        return Federation([Participant(EVERYONE, together, tests, public[EVERYONE])], server)
    clients = [
        Participant(name, data[name], {name: tests[name]}, public[name], division.labels.get(name))
        for name in names
    ]
    return Federation(clients, server)


def served(config: RunConfig) -> Participant | None:
    """Load the data and the base of a deployment's server.

    Args:
        config: The run.

    Returns:
        The server with its loaded base; None if the server has no model of its own.

    Raises:
        CoterieError: A text or the base cannot be read, or a text is too short.
    """
    if config.server is None:
        return None
    precision, window = config.precision, config.data.window
    base = load_base(config.base_of(SERVER), precision, window, config.root, config.device)
    public = _public(config, {SERVER: base.tokenizer}, _public_items(config, None))
    return replace(_server(config, base.tokenizer, public[SERVER], None), base=base)


def _tokenizers(
    config: RunConfig, tokenizer: Tokenizer, names: Sequence[str]
) -> dict[str, Tokenizer]:
    """Return each participant's tokenizer; load only one tokenizer for each base."""
    loaded = {config.base: tokenizer}
    for name in names:
        base = config.base_of(name)
        if base not in loaded:
            try:
                loaded[base] = load_tokenizer(base, config.root)
            except CoterieError as error:
                raise CoterieError(f"The base of {name}: {error}") from error
    return {name: loaded[config.base_of(name)] for name in names}


def _public_items(config: RunConfig, set_aside: Texts[Any] | None) -> list[Any] | None:
    """Return the documents or samples of the public text, or None if the run has no public text.

    Args:
        config: The run.
        set_aside: The public text set aside by the run file's `divide`, or None if there is none.
    """
    if set_aside is not None:
        return set_aside.train
    if config.data.public is None:
        return None
    return whole_text(config.data.public, config.data, config.root, PUBLIC)


def _public(
    config: RunConfig, tokenizers: Mapping[str, Tokenizer], items: list[Any] | None
) -> Mapping[str, Split | None]:
    """Return the public text for each participant, tokenised only once for each base."""
    if items is None:
        return dict.fromkeys(tokenizers)
    bases = {config.base_of(name): tokenizer for name, tokenizer in tokenizers.items()}
    splits = {b: encoded(items, t, config.data, "public", PUBLIC) for b, t in bases.items()}
    return {name: splits[config.base_of(name)] for name in tokenizers}


def public_digest(config: RunConfig) -> str | None:
    """Hash the text of `data.public`, so that machines can verify that their copies are equal.

    Args:
        config: The run.

    Returns:
        A hexadecimal hash; None if the run has no public text.

    Raises:
        CoterieError: The text cannot be read.
    """
    if (items := _public_items(config, None)) is None:
        return None
    digest = blake2b(digest_size=16)
    for item in items:
        digest.update(json.dumps(_plain(item)).encode())
    return digest.hexdigest()


def described_templates(
    config: RunConfig, tokenizers: Mapping[BaseSpec, Tokenizer]
) -> dict[str, dict[str, dict[str, str]]]:
    """Describe the chat templates of a run, for storage in the run folder.

    Args:
        config: The run.
        tokenizers: The tokenizer of each base.

    Returns:
        A mapping with the name and hash of each base's template under the key `chat_templates`, or
        an empty mapping if the data are not conversations.
    """
    if not config.data.chats:
        return {}
    templates = {b.name: chat_template(t, config.data.chat_template) for b, t in tokenizers.items()}
    described = {base: {"name": t.name, "hash": t.digest} for base, t in templates.items()}
    return {"chat_templates": described}


def _plain(item: Any) -> Any:
    """Return the content of a text or sample as JSON values that do not depend on the machine.

    Two attributes of samples are omitted: `where` (the location) and `fields` (template inputs).
    """
    if isinstance(item, str):
        return item
    return {key: value for key, value in vars(item).items() if key not in ("where", "fields")}


def _server(
    config: RunConfig, tokenizer: Tokenizer, public: Split | None, set_aside: Texts[Any] | None
) -> Participant:
    """Create the participant for a server whose own model is trained on the public text.

    Its `tests` are empty if there is no text on which to score the server's model.
    """
    assert config.server is not None
    items: dict[str, list[Any]] = {}
    if config.server.test is not None:
        path, owner = config.server.test, "The server's test text"
        items = dict.fromkeys(HELD_OUT, whole_text(path, config.data, config.root, owner))
    elif set_aside is not None and set_aside.test:
        items = {split: getattr(set_aside, split) for split in HELD_OUT}
    held_out = {
        split: encoded(records, tokenizer, config.data, split, f"The server's {split} text")
        for split, records in items.items()
    }
    tests = {SERVER: held_out[config.evaluation.split]} if held_out else {}
    train = NOTHING if public is None else public
    data = ClientData(train, *(held_out.get(split, NOTHING) for split in HELD_OUT))
    return Participant(SERVER, data, tests, public)


def client_context(
    config: RunConfig, base: Base, participant: Participant, log: Log, ledger: Ledger | None = None
) -> ClientContext:
    """Create the context that the client-side object of a method receives.

    In a pooled run, the batch size is multiplied by the number of clients whose data are pooled.

    Args:
        config: The run.
        base: The client's base. Any adapter that is attached to the base is detached.
        participant: The client and its data.
        log: Called with each metric of the client.
        ledger: The ledger of the client's privacy budget; by default, an empty ledger.
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
        least_others=config.aggregation.least_others,
        replay=participant.replay,
    )


def server_context(
    config: RunConfig,
    base: nn.Module,
    clients: Sequence[ClientId],
    server: Participant | None,
    log: Log,
) -> ServerContext:
    """Create the context that the server-side object of a method receives.

    Args:
        config: The run.
        base: The run's base without weights, on the meta device.
        clients: The names of the clients.
        server: The server's data and base; None if the server has no model.
        log: Called with each metric of the server.
    """
    context = None
    if server is not None:
        assert server.base is not None, "a server that has its own model needs a loaded base"
        context = client_context(config, server.base, server, log)
    settings = config.training, config.rounds, config.aggregation.least_others
    return ServerContext(config.seed, base, tuple(sorted(clients)), log, *settings, context)
