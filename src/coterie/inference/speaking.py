"""Conversations with a model: each answer is streamed, and the model's history grows by it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from coterie.bases import Base, Tokenizer
from coterie.data.chat import ChatTemplate
from coterie.data.items import Turn
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError
from coterie.evaluation.generation import Sampling, before_any, context_length, ends_of, generated
from coterie.seeding import generator


@dataclass
class Speaker:
    """One side of a conversation: a model, and what has been said to it and by it.

    model: puts the model in place, as several may share a base. system: the system prompt, if any.
    """

    base: Base
    model: Callable[[], PreTrainedModel]
    template: ChatTemplate
    sampling: Sampling
    system: str | None = None
    left_out: int = field(default=0, init=False)
    """Exchanges, the oldest, that the last answer was given without, for lack of context."""

    def __post_init__(self) -> None:
        """Nothing has been said."""
        self._system = () if self.system is None else (Turn("system", self.system),)
        self._said: list[Turn] = []
        self._encoder = PartEncoder(bare_encoder(self.base.tokenizer)[0])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far, with the system prompt if there is one."""
        return (*self._system, *self._said)

    def reset(self) -> None:
        """Forget what was said, but not the system prompt."""
        self._said, self.left_out = [], 0

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """What the model answers; `show` is called with each piece of it as soon as it is written.

        An answer without a word, thinking aside, is not remembered, and nor is its question. An
        answer that is interrupted (KeyboardInterrupt, which is raised again) is remembered as far
        as it came.
        Raises CoterieError if the question alone does not fit in the base's context, or if the
        template refuses it.
        """
        model = self.model()
        ids = self._read([*self._said, Turn("user", question)], context_length(model))
        ends, stops = ends_of(self.base.tokenizer, self.template.markers)
        stream = _Stream(self.base.tokenizer, ends, stops, show)
        until = {"stop_strings": stops, "tokenizer": self.base.tokenizer} if stops else {}
        prompt = torch.tensor([ids], device=self.base.device)
        chance = generator(self.sampling.seed, "chat", len(self._said))
        try:
            with torch.random.fork_rng():
                torch.manual_seed(chance.initial_seed())
                generated(
                    model,
                    prompt,
                    torch.ones_like(prompt),
                    generation_config=self.sampling.config(ends),
                    streamer=stream,
                    **until,
                )
        finally:
            said = stream.finish()
            if Turn("assistant", said).answer:
                self._said += [Turn("user", question), Turn("assistant", said)]
        return said

    def _read(self, turns: Sequence[Turn], longest: int | None) -> list[int]:
        """Tokens of the conversation as the template opens its next answer, without the oldest
        exchanges if the base cannot read all."""
        kept = list(turns)
        while True:
            said = (*self._system, *kept)
            ids = self._encoder.opening(
                self.template.opening_and_answer(said, self.sampling.thinking)
            )
            # The last token that is written is not read.
            if longest is None or len(ids) + self.sampling.tokens <= longest + 1:
                self.left_out = (len(turns) - len(kept)) // 2
                return ids
            if len(kept) == 1:
                raise CoterieError(
                    f"The question's {len(ids)} tokens and {self.sampling.tokens} new ones exceed "
                    f"the base's context of {longest} tokens; ask a shorter one or lower --tokens."
                )
            del kept[:2]


@dataclass
class _Stream(BaseStreamer):
    """Hands on the text of an answer as far as later tokens cannot change it."""

    tokenizer: Tokenizer
    ends: Sequence[int]
    stops: Sequence[str]
    show: Callable[[str], None]
    ids: list[int] | None = None
    shown: str = ""

    def put(self, value: Tensor) -> None:
        """First the prompt, (1, n), then each token that is written, (1,)."""
        if self.ids is None:
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        text = self._text().rstrip("\ufffd")  # of a character that is not whole yet
        held_back = max((_begun(stop, text) for stop in self.stops), default=0)
        self._hand_on(text[: len(text) - held_back].rstrip())

    def end(self) -> None:
        """`finish` does it, as it does after an interruption."""

    def finish(self) -> str:
        """Hand on what was held back; the whole answer."""
        text = self._text().rstrip()
        self._hand_on(text)
        return text

    def _text(self) -> str:
        ids = [token for token in self.ids or () if token not in self.ends]
        text: Any = self.tokenizer.decode(ids, skip_special_tokens=True)
        return before_any(text, self.stops).lstrip()

    def _hand_on(self, text: str) -> None:
        new, self.shown = text[len(self.shown) :], max(self.shown, text, key=len)
        if new:
            self.show(new)


def _begun(stop: str, text: str) -> int:
    """Characters at the end of a text with which a marker may begin."""
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
