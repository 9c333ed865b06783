"""What a run reads of its clients' texts, for whoever looks at them before it begins."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from coterie.bases import Tokenizer
from coterie.config.run import RunConfig
from coterie.data.chat import chat_template
from coterie.data.control import control_tokens, count_control
from coterie.data.quality import Progress, Quality, SpecialTokens, quality, unknown_tokens
from coterie.data.split import Split
from coterie.data.survey import survey
from coterie.data.texts import SPLITS, Texts
from coterie.data.tokens import ClientData
from coterie.training.context import ClientId

PUBLIC = "The public text"


@dataclass(frozen=True)
class Reading:
    """What clients read, sorted by name: texts, and their tokens."""

    texts: Mapping[ClientId, Texts[Any]]
    data: Mapping[ClientId, ClientData]
    removed: Mapping[ClientId, int]
    """Training texts that `data.deduplicate` removed."""
    labels: Mapping[ClientId, Mapping[str, int]]
    """As in `Participant`."""
    tokenizers: Mapping[ClientId, Tokenizer]
    public: Sequence[Any] = ()
    """Documents or samples of the public text."""
    public_split: Split | None = None
    """The public text as the first client reads it."""

    def quality(
        self, config: RunConfig, most: int, progress: Progress = lambda done, of: None
    ) -> Quality:
        """What is found in these texts; near duplicates, in `most` characters."""
        left_out = survey(_sources(config), config.data, config.divide, config.root)
        parts = [
            (name, split, getattr(own, split), getattr(self.data[name], split))
            for name, own in self.texts.items()
            for split in SPLITS
        ]
        if self.public_split is not None:
            parts.append(("everybody", "public", self.public, self.public_split))

        @cache
        def control(tokenizer: Tokenizer, chats: bool) -> re.Pattern[str]:
            template = chat_template(tokenizer, config.data.chat_template) if chats else None
            return control_tokens(tokenizer, template)

        special: list[SpecialTokens] = []
        for name, split, items, read in parts:
            tokenizer = self.tokenizers.get(name, self.tokenizers[min(self.texts)])
            tokens = control(tokenizer, config.data.bound.has_chats(items))
            counts = unknown_tokens(read, tokenizer), count_control(items, tokens)
            special.append(SpecialTokens(name, split, len(read.ids), *counts))
        removed = self.removed if config.data.deduplicate else None
        return quality(self.texts, self.data, most, left_out, special, removed, progress)


def _sources(config: RunConfig) -> list[tuple[str, str]]:
    """Every file or folder that a run names, after its owner."""
    sources: list[tuple[str, str | None]] = [
        (f"Client {client.name}", source)
        for client in config.clients
        for source in (client.path, client.train, client.validation, client.test)
    ]
    if config.divide is not None:
        given = config.divide.source
        given = {"": given} if isinstance(given, str) else given
        sources += [("divide", s if isinstance(s, str) else s.source) for s in given.values()]
        sources += [("divide", config.divide.validation), ("divide", config.divide.test)]
    sources += [(PUBLIC, config.data.public)]
    if config.server is not None:
        sources += [("The server", config.server.test)]
    return [(owner, source) for owner, source in sources if source is not None]
