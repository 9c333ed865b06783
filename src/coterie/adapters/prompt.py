"""Soft prompts: vectors that stand before the tokens' embeddings and are all that is trained.

PEFT runs them; a base is wrapped and none of its modules change. Their first values come from the
run's seed alone, never from torch's own generator, and never from the base's weights, so that a
server without weights can draw them too.
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
    """One client's soft prompt, or the encoder that makes it; the base may be on the meta device.

    Args:
        base: a causal language model, of which the width, dtype and device are read.
        encoder: `prompt_tokens: (batch, tokens)` to vectors (batch, tokens, dim), with an
            `embedding`, as PEFT wants it.
        config: PEFT's settings that the encoder belongs to.
    """

    def __init__(self, base: nn.Module, encoder: nn.Module, config: Any) -> None:
        self.encoder = encoder.to(**trained_beside(_embedding(base).weight))
        self.config = config
        self._wrapped: PeftModel | None = None
        named = self.encoder.named_parameters()
        super().__init__(Parameter(f"prompt/{name}", "prompt", p, "zero") for name, p in named)

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """The base behind this prompt, in place of any adapter; it is frozen.

        PEFT's model runs, generates and is evaluated as the base is, but is no PreTrainedModel.
        """
        super().attach(base)
        if self._wrapped is None or self._wrapped.base_model is not base:
            from coterie.adapters.prompt_model import PromptModel

            # PEFT makes an encoder of its own, of which only the place is used, and draws it.
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # it asks transformers old questions
                self._wrapped = PromptModel(base, self.config)
            encoders = self._wrapped.prompt_encoder
            assert isinstance(encoders, nn.ModuleDict)
            encoders["default"] = self.encoder
            self._wrapped.eval()
        return cast(PreTrainedModel, self._wrapped)


class SoftPrompt(nn.Module):
    """Prompt tuning: `start + embedding`, both (tokens, dim).

    `start` is where the prompt begins and is not trained: zero, or the embeddings of a text.
    """

    start: Tensor

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.zeros(tokens, dim), freeze=False)
        self.register_buffer("start", torch.zeros(tokens, dim), persistent=False)

    def forward(self, prompt_tokens: Tensor) -> Tensor:
        """prompt_tokens: (batch, tokens) int64 to vectors (batch, tokens, dim)."""
        return self.start[prompt_tokens] + self.embedding(prompt_tokens)

    @torch.no_grad()
    def start_from(self, embedding: nn.Module, ids: list[int]) -> None:
        """Begin with the embeddings of these tokens, repeated or cut to the prompt's length."""
        tokens = len(self.start)
        rows = torch.tensor((ids * tokens)[:tokens], device=self.start.device)
        self.start.copy_(embedding(rows))


def soft_prompt(base: nn.Module, tokens: int, seed: int, std: float) -> PromptAdapter:
    """Prompt tuning (arXiv 2104.08691): the vectors themselves, drawn with this deviation."""
    from peft import PromptTuningConfig

    dim = _embedding(base).embedding_dim
    encoder = SoftPrompt(tokens, dim)
    _begin(encoder, seed, std)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens, token_dim=dim)
    return PromptAdapter(base, encoder, config)


def prompt_encoder(base: nn.Module, tokens: int, hidden: int | None, seed: int) -> PromptAdapter:
    """P-tuning (arXiv 2103.10385): vectors that an MLP of two hidden layers makes of an embedding.

    hidden: width of those layers; None: the base's. Values begin as PyTorch begins such layers.
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
    _begin(encoder, seed, 1.0)
    return PromptAdapter(base, encoder, config)


@torch.no_grad()
def _begin(encoder: nn.Module, seed: int, std: float) -> None:
    """Draw the first values: embeddings normal; weights of linear layers Kaiming uniform
    (a = sqrt 5), their biases uniform up to 1 / sqrt(in)."""
    for path, module in encoder.named_modules():
        for name, value in module.named_parameters(recurse=False):
            chance = generator(seed, "init", f"prompt/{path}.{name}")
            if isinstance(module, nn.Linear):
                # Kaiming's bound with a = sqrt 5 is 1 / sqrt(in), too.
                bound = module.in_features**-0.5
                value.uniform_(-bound, bound, generator=chance)
            else:
                value.normal_(std=std, generator=chance)


def _embedding(base: nn.Module) -> nn.Embedding:
    embedding = cast(PreTrainedModel, base).get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding
