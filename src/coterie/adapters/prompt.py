"""Soft prompts: trained vectors that precede the embeddings of the input tokens.

PEFT runs soft prompts by wrapping a base, and changes none of the base's modules. Initial
values depend only on the run's seed, never on torch's global generator or the base's weights, so a
server that lacks the base's weights can draw the same values.
"""

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coterie.adapters.adapter import Trainable
from coterie.adapters.parameter import Parameter, trained_beside
from coterie.seeding import generator

if TYPE_CHECKING:
    from peft import PeftModel


class PromptAdapter(Trainable):
    """A client's soft prompt, whose vectors are computed by an encoder.

    Args:
        base: A causal language model. Only the base's width, dtype and device are used, so the base
            may be on the meta device.
        encoder: A module that maps `prompt_tokens` (batch, tokens) to vectors (batch, tokens, dim)
            and has an attribute `embedding`, as PEFT requires.
        config: PEFT's configuration of the encoder.
    """

    def __init__(self, base: nn.Module, encoder: nn.Module, config: Any) -> None:
        self.encoder = encoder.to(**trained_beside(_embedding(base).weight))
        self.config = config
        self._wrapped: PeftModel | None = None
        named = self.encoder.named_parameters()
        super().__init__(Parameter(f"prompt/{name}", "prompt", p, "zero") for name, p in named)

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        # PEFT's model has the base's interface, but is not a PreTrainedModel.
        super().attach(base)
        if self._wrapped is None or self._wrapped.base_model is not base:
            from coterie.adapters.prompt_model import PromptModel

            # PEFT creates an encoder with random values, which is replaced below.
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # PEFT uses deprecated functions
                self._wrapped = PromptModel(base, self.config)
            encoders = self._wrapped.prompt_encoder
            assert isinstance(encoders, nn.ModuleDict)
            encoders["default"] = self.encoder
            self._wrapped.eval()
        return cast(PreTrainedModel, self._wrapped)


class SoftPrompt(nn.Module):
    """A module that computes the vectors of a soft prompt as `start + embedding`.

    Both summands have the shape (tokens, dim). Only `embedding` is trained. `start` is zero, or
    contains the embeddings of the tokens of a text.
    """

    start: Tensor

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.zeros(tokens, dim), freeze=False)
        self.register_buffer("start", torch.zeros(tokens, dim), persistent=False)

    def forward(self, prompt_tokens: Tensor) -> Tensor:
        """Map the prompt's int64 token ids (batch, tokens) to vectors (batch, tokens, dim)."""
        return self.start[prompt_tokens] + self.embedding(prompt_tokens)

    @torch.no_grad()
    def start_from(self, embedding: nn.Module, ids: list[int]) -> None:
        """Set `start` to a text's embeddings, repeated or truncated to the prompt's length.

        Args:
            embedding: A module that maps token ids to embeddings.
            ids: Token ids of the text.
        """
        tokens = len(self.start)
        rows = torch.tensor((ids * tokens)[:tokens], device=self.start.device)
        self.start.copy_(embedding(rows))


def soft_prompt(base: nn.Module, tokens: int, seed: int, std: float) -> PromptAdapter:
    """Create a soft prompt for prompt tuning (arXiv 2104.08691), which trains the vectors directly.

    Args:
        base: A causal language model; it may be on the meta device.
        tokens: Length of the prompt.
        seed: The run's seed.
        std: Standard deviation of the initial values.
    """
    from peft import PromptTuningConfig

    dim = _embedding(base).embedding_dim
    encoder = SoftPrompt(tokens, dim)
    _initialise(encoder, seed, std)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens, token_dim=dim)
    return PromptAdapter(base, encoder, config)


def prompt_encoder(base: nn.Module, tokens: int, hidden: int | None, seed: int) -> PromptAdapter:
    """Create a soft prompt for P-tuning (arXiv 2103.10385).

    An MLP with two hidden layers computes the vectors of the prompt from a trained embedding.
    Initial values have PyTorch's default distributions.

    Args:
        base: A causal language model; it may be on the meta device.
        tokens: Length of the prompt.
        hidden: Width of the hidden layers; None for the base's width.
        seed: The run's seed.
    """
    from peft import PromptEncoder, PromptEncoderConfig

    dim = _embedding(base).embedding_dim
    config = PromptEncoderConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=tokens,
        token_dim=dim,
        num_transformer_submodules=1,
        encoder_reparameterization_type="MLP",
        encoder_hidden_size=dim if hidden is None else hidden,
    )
    with torch.random.fork_rng(devices=[]):
        encoder = PromptEncoder(config)
    _initialise(encoder, seed, 1.0)
    return PromptAdapter(base, encoder, config)


@torch.no_grad()
def _initialise(encoder: nn.Module, seed: int, std: float) -> None:
    """Set an encoder's initial values.

    Embeddings are normal with standard deviation `std`. The weights and biases of linear layers are
    uniform between -1 / sqrt(in) and 1 / sqrt(in).
    """
    for path, module in encoder.named_modules():
        for name, value in module.named_parameters(recurse=False):
            chance = generator(seed, "init", f"prompt/{path}.{name}")
            if isinstance(module, nn.Linear):
                # PyTorch's default. For weights, it equals Kaiming's bound with a = sqrt 5.
                bound = module.in_features**-0.5
                value.uniform_(-bound, bound, generator=chance)
            else:
                value.normal_(std=std, generator=chance)


def _embedding(base: nn.Module) -> nn.Embedding:
    embedding = cast(PreTrainedModel, base).get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding
