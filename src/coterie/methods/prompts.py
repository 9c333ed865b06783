"""Federated soft prompts: the base is frozen, and trained vectors are placed before the text.

FedPrompt (arXiv 2208.12268) averages the vectors. Federated P-tuning averages the encoder that
computes the vectors. In published comparisons, P-tuning averages only the computed vectors, so the
clients' encoders are never aggregated.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from coterie.adapters.prompt import PromptAdapter, SoftPrompt, prompt_encoder, soft_prompt
from coterie.errors import CoterieError
from coterie.methods.adapter import AdapterClient, AdapterMethod
from coterie.methods.contract import ClientContext, ClientId
from coterie.methods.registry import fine_tuned

STD = 0.02
"""The standard deviation of the initial values of a random prompt, as is usual for embeddings."""
TEXT = (
    "Generate a clear and direct response that accurately fulfills the task based on the provided "
    "instruction and any given context."
)
"""The default text that initialises a prompt, from FedAMoLE (arXiv 2411.19128, appendix D.1).

The comparison in that paper uses this text for data sets with written answers. In the comparison,
the prompt has as many vectors as the text has tokens.
"""


class PromptClient(AdapterClient["FedPrompt | FedPTuning"]):
    """A client that trains a soft prompt.

    Raises:
        CoterieError: The window and the prompt together exceed the base's context length.
    """

    def __init__(self, method: "FedPrompt | FedPTuning", context: ClientContext) -> None:
        longest = getattr(
            context.base.model.config.get_text_config(), "max_position_embeddings", None
        )
        if longest is not None and context.window + method.virtual_tokens > longest:
            raise CoterieError(
                f"data.window ({context.window} tokens) plus virtual_tokens "
                f"({method.virtual_tokens}) exceeds the base's context length ({longest} tokens); "
                "lower data.window or virtual_tokens."
            )
        super().__init__(method, context)


class FedPrompt(AdapterMethod):
    """Federated prompt tuning; every client's result is the base with the averaged prompt.

    The trained parameter, which is uploaded and averaged, is the difference between the prompt and
    the embeddings of `init_text`. The difference is initialised with zeros, so a server without the
    base's weights has the same initial values as the clients.
    """

    name: ClassVar[str] = "fedprompt"
    paper: ClassVar[str] = "arXiv 2208.12268"
    summary: ClassVar[str] = "soft prompt averaged; one model for all"
    shared_roles: ClassVar[tuple[str, ...]] = ("prompt",)
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    virtual_tokens: int = Field(default=23, ge=1)
    """number of soft-prompt vectors before the text"""
    init_text: str | None = Field(default=TEXT, min_length=1)
    """text that initialises the prompt, repeated or truncated to virtual_tokens tokens; null: the
    vectors are initialised at random"""

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> PromptAdapter:
        return soft_prompt(base, self.virtual_tokens, seed, STD if self.init_text is None else 0.0)

    def client(self, context: ClientContext) -> AdapterClient:
        client = PromptClient(self, context)
        # Only clients embed the text: the server may lack the tokenizer and the base's weights.
        if self.init_text is not None:
            ids = context.base.tokenizer(self.init_text)["input_ids"]
            embeddings = context.base.model.get_input_embeddings()
            assert isinstance(client.adapter, PromptAdapter)
            assert isinstance(client.adapter.encoder, SoftPrompt)
            client.adapter.encoder.start_from(embeddings, list(ids))
        return client


class FedPTuning(AdapterMethod):
    """Federated P-tuning; every client's result is the base with the averaged prompt encoder."""

    name: ClassVar[str] = "fedptuning"
    paper: ClassVar[str] = "arXiv 2103.10385"
    summary: ClassVar[str] = "soft-prompt encoder averaged; one model for all"
    shared_roles: ClassVar[tuple[str, ...]] = ("prompt",)
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    virtual_tokens: int = Field(default=20, ge=1)
    """number of soft-prompt vectors before the text"""
    encoder_hidden_size: int | None = Field(default=None, ge=1)
    """hidden size of the prompt encoder; null: hidden size of the base"""

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> PromptAdapter:
        return prompt_encoder(base, self.virtual_tokens, self.encoder_hidden_size, seed)

    def client(self, context: ClientContext) -> AdapterClient:
        return PromptClient(self, context)


PRESETS = fine_tuned("fedprompt") | fine_tuned("fedptuning")
