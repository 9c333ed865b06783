"""The clients' texts as a run reads them, for checks of the texts' quality before the run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from coterie.bases import Tokenizer
from coterie.config.run import RunConfig
from coterie.data.chat import chat_template
from coterie.data.control import control_tokens, count_control
from coterie.data.split import Split
from coterie.data.texts import SPLITS, Texts
from coterie.data.tokens import ClientData
from coterie.evaluation.quality import Progress, Quality, SpecialTokens, quality, unknown_tokens
from coterie.evaluation.survey import survey
from coterie.training.context import ClientId

PUBLIC = "The public text"


@dataclass(frozen=True)
class Reading:
    """The texts and tokens of all clients, in the order of the clients' names."""

    texts: Mapping[ClientId, Texts[Any]]
    """Each client's documents or samples."""
    data: Mapping[ClientId, ClientData]
    """Each client's tokens."""
    removed: Mapping[ClientId, int]
    """The number of training texts that `data.deduplicate` removed from each client."""
    labels: Mapping[ClientId, Mapping[str, int]]
    """The number of records per label in each client's training text; see `Participant.labels`."""
    tokenizers: Mapping[ClientId, Tokenizer]
    """The tokenizer of each client's base."""
    public: Sequence[Any] = ()
    """The documents or samples of the public text."""
    public_split: Split | None = None
    """The public text, tokenised with the first client's tokenizer; None without a public text."""

    def quality(
        self, config: RunConfig, most: int, progress: Progress = lambda done, of: None
    ) -> Quality:
        """Measure the quality of the texts.

        Very short texts, duplicates and special tokens are counted, and so are the records, fields
        and files that the run does not read.

        Args:
            config: The run.
            most: The maximum number of characters, in total, that are searched for near duplicates.
            progress: Called during the search with the amount of work done and the total amount.

        Returns:
            The measurements. A measurement that concerns one client contains the client's name.
        """
        omitted = survey(_sources(config), config.data, config.divide, config.root)
        splits = [
            (name, split, getattr(texts, split), getattr(self.data[name], split))
            for name, texts in self.texts.items()
            for split in SPLITS
        ]
        if self.public_split is not None:
            splits.append(("everybody", "public", self.public, self.public_split))

        @cache
        def control(tokenizer: Tokenizer, chats: bool) -> re.Pattern[str]:
            template = chat_template(tokenizer, config.data.chat_template) if chats else None
            return control_tokens(tokenizer, template)

        special: list[SpecialTokens] = []
        for name, split, items, tokens in splits:
            tokenizer = self.tokenizers.get(name, self.tokenizers[min(self.texts)])
            pattern = control(tokenizer, config.data.bound.has_chats(items))
            counts = unknown_tokens(tokens, tokenizer), count_control(items, pattern)
            special.append(SpecialTokens(name, split, len(tokens.ids), *counts))
        removed = self.removed if config.data.deduplicate else None
        return quality(self.texts, self.data, most, omitted, special, removed, progress)


def _sources(config: RunConfig) -> list[tuple[str, str]]:
    """List the files and folders named in a run file, as pairs (owner, path).

    The owner is a label for messages, such as "Client anna".
    """
    sources: list[tuple[str, str | None]] = [
        (f"Client {client.name}", source)
        for client in config.clients
        for source in (client.path, client.train, client.validation, client.test)
    ]
    if config.divide is not None:
        source = config.divide.source
        by_label = {"": source} if isinstance(source, str) else source
        sources += [("divide", s if isinstance(s, str) else s.source) for s in by_label.values()]
        sources += [("divide", config.divide.validation), ("divide", config.divide.test)]
    sources += [(PUBLIC, config.data.public)]
    if config.server is not None:
        sources += [("The server", config.server.test)]
    return [(owner, source) for owner, source in sources if source is not None]
