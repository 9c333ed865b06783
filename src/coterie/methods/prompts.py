"""Federated soft prompts: the base is untouched, a few vectors before the text are averaged.

FedPrompt (arXiv 2208.12268) averages the vectors. Federated P-tuning averages the whole encoder
that makes them; averaging only what it makes, as published comparisons do, would train encoders
that never meet.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from coterie.adapters import Role
from coterie.adapters.prompt import PromptAdapter, prompt_encoder, soft_prompt
from coterie.errors import CoterieError
from coterie.methods.adapter import AdapterClient, AdapterMethod, fine_tuned
from coterie.methods.contract import ClientContext, ClientId

STD = 0.02
"""Of a prompt that begins with no text: that of most bases' embeddings before pretraining."""
TEXT = (
    "Generate a clear and direct response that accurately fulfills the task based on the provided "
    "instruction and any given context."
)
"""With what FedAMoLE's comparison (arXiv 2411.19128, appendix D.1) begins a prompt for answers that
are written; its prompt is as long as the text."""


class PromptClient(AdapterClient):
    """Trains a prompt; raises CoterieError if the base's context has no room for it."""

    def __init__(self, method: "FedPrompt | FedPTuning", context: ClientContext) -> None:
        longest = getattr(
            context.base.model.config.get_text_config(), "max_position_embeddings", None
        )
        if longest is not None and context.window + method.virtual_tokens > longest:
            raise CoterieError(
                f"data.window ({context.window} tokens) plus virtual_tokens "
                f"({method.virtual_tokens}) exceeds the {longest} tokens that the base can "
                "read; lower one of them."
            )
        super().__init__(method, context)


class FedPrompt(AdapterMethod):
    """Prompt tuning; the averaged prompt is the result.

    What is trained, sent and averaged is the prompt's distance from the embeddings of `init_text`:
    it begins as zero, so that a server without the base's weights has the same first values.
    """

    name: ClassVar[str] = "fedprompt"
    paper: ClassVar[str] = "arXiv 2208.12268"
    summary: ClassVar[str] = "soft prompt averaged; one model for all"
    shared_roles: ClassVar[tuple[Role, ...]] = ("prompt",)
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    virtual_tokens: int = Field(default=23, ge=1)
    """number of soft-prompt vectors before the text"""
    init_text: str | None = Field(default=TEXT, min_length=1)
    """text that initialises the prompt, repeated or cut to length; null: random vectors"""

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> PromptAdapter:
        """A soft prompt, still without its text."""
        return soft_prompt(base, self.virtual_tokens, seed, STD if self.init_text is None else 0.0)

    def client(self, context: ClientContext) -> AdapterClient:
        """Gives the prompt its text, which takes a tokenizer and weights."""
        client = PromptClient(self, context)
        if self.init_text is not None:
            ids = context.base.tokenizer(self.init_text)["input_ids"]
            embeddings = context.base.model.get_input_embeddings()
            client.adapter.encoder.start_from(embeddings, list(ids))
        return client


class FedPTuning(AdapterMethod):
    """P-tuning; the averaged encoder's prompt is the result."""

    name: ClassVar[str] = "fedptuning"
    paper: ClassVar[str] = "arXiv 2103.10385"
    summary: ClassVar[str] = "soft-prompt encoder averaged; one model for all"
    shared_roles: ClassVar[tuple[Role, ...]] = ("prompt",)
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    virtual_tokens: int = Field(default=20, ge=1)
    """number of soft-prompt vectors before the text"""
    encoder_hidden_size: int | None = Field(default=None, ge=1)
    """hidden size of the prompt encoder; null: the base's"""

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> PromptAdapter:
        """A prompt encoder."""
        return prompt_encoder(base, self.virtual_tokens, self.encoder_hidden_size, seed)

    def client(self, context: ClientContext) -> AdapterClient:
        """An encoder and its training."""
        return PromptClient(self, context)


PRESETS = fine_tuned("fedprompt") | fine_tuned("fedptuning")
