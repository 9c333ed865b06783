"""Conversations with a model: streamed answers, and the history that the model reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from coterie.bases import Base
from coterie.data.chat import ChatTemplate
from coterie.data.items import Turn
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError, enough_memory
from coterie.evaluation.gate import Gate, answering
from coterie.evaluation.generation import Sampling, context_length, ends_of, generated
from coterie.inference.streaming import StreamedText
from coterie.seeding import generator

FEWER = "a smaller number of new tokens"
"""A change that reduces the memory of generation."""


@dataclass
class Speaker:
    """A model and the history of its conversation.

    Args:
        base: The model's base, with its tokenizer.
        model: Function without arguments that attaches the adapter to the base and returns the
            resulting model. The function is called for every answer, because another speaker that
            shares the base may have attached its own adapter in the meantime.
        template: The chat template that renders the conversation.
        sampling: Settings with which answers are generated.
        system: The system prompt, if any.
        gate: The client's gate; None if the model answers all questions.
    """

    base: Base
    model: Callable[[], PreTrainedModel]
    template: ChatTemplate
    sampling: Sampling
    system: str | None = None
    gate: Gate | None = None
    left_out: int = field(default=0, init=False)
    """The number of questions that the last prompt omitted, with their answers, to fit the context.

    The oldest questions are omitted first.
    """

    def __post_init__(self) -> None:
        """Begin with an empty history."""
        self._system = () if self.system is None else (Turn("system", self.system),)
        self._history: list[Turn] = []
        self._encoder = PartEncoder(bare_encoder(self.base.tokenizer)[0])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far, with the system prompt if there is one."""
        return (*self._system, *self._history)

    def reset(self) -> None:
        """Delete the history except the system prompt."""
        self._history, self.left_out = [], 0

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """Generate the answer to a question, and add the question and answer to the history.

        If an exception such as KeyboardInterrupt interrupts the generation, the question and the
        partial answer are added. Neither is added if the answer is empty, or contains nothing but
        thinking (the model's reasoning between `<think>` and `</think>`).

        Args:
            question: The user's turn.
            show: Function that is called with each piece of the answer as soon as the piece is
                generated.

        Returns:
            The answer.

        Raises:
            CoterieError: The question alone does not fit into the base's context, or the chat
                template refuses the conversation.
        """
        model = self.model()
        ids = self._prompt([*self._history, Turn("user", question)], context_length(model))
        ends, stops = ends_of(self.base.tokenizer, self.template.markers)
        stream = _Stream(StreamedText(self.base.tokenizer, ends, stops), show)
        options: Any = {"generation_config": self.sampling.config(ends), "streamer": stream}
        options |= {"stop_strings": stops, "tokenizer": self.base.tokenizer} if stops else {}
        prompt = torch.tensor([ids], device=self.base.device)
        seed = generator(self.sampling.seed, "chat", len(self._history)).initial_seed()
        try:
            with (
                enough_memory("an answer", lambda: [FEWER]),
                answering(self.gate, self.base, model, prompt[0].cpu()) as answerer,
                torch.random.fork_rng(),
            ):
                torch.manual_seed(seed)
                generated(answerer, prompt, torch.ones_like(prompt), **options)
        finally:
            answer = stream.finish()
            if Turn("assistant", answer).answer:
                self._history += [Turn("user", question), Turn("assistant", answer)]
        return answer

    def _prompt(self, turns: Sequence[Turn], context: int | None) -> list[int]:
        """Encode the conversation as the prompt for the next answer.

        If the prompt and the longest possible answer would exceed the context, the oldest questions
        and their answers are omitted.

        Args:
            turns: The conversation without the system prompt; the last turn is a question.
            context: The model's context length in tokens, or None if it is unlimited.
        """
        recent = list(turns)
        while True:
            ids = self._encoder.opening(
                self.template.opening_and_answer((*self._system, *recent), self.sampling.thinking)
            )
            # The model does not read the last token that it generates.
            if context is None or len(ids) + self.sampling.tokens <= context + 1:
                self.left_out = (len(turns) - len(recent)) // 2
                return ids
            if len(recent) == 1:
                raise CoterieError(
                    f"A prompt of {len(ids)} tokens and an answer of {self.sampling.tokens} tokens "
                    f"exceed the base's context of {context} tokens; ask a shorter question, or "
                    "lower --tokens."
                )
            del recent[:2]


@dataclass
class _Stream(BaseStreamer):
    """A streamer that shows each piece of an answer when later tokens can no longer change it."""

    text: StreamedText
    show: Callable[[str], None]
    has_prompt: bool = False

    def put(self, value: Tensor) -> None:
        if self.has_prompt:
            self._show(self.text.add(value.flatten().tolist()))
        self.has_prompt = True  # the first call passes the prompt (1, n), later calls a token (1,)

    def end(self) -> None:
        pass  # `finish` does the work, as it also runs after an interruption

    def finish(self) -> str:
        """Show the rest of the answer, and return the whole answer."""
        self._show(self.text.finish())
        return self.text.shown

    def _show(self, piece: str) -> None:
        if piece:
            self.show(piece)
