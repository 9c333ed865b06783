"""PEFT's model of a base behind a soft prompt, where PEFT would be wrong without a word."""

import warnings
from typing import Any

from peft import PeftModelForCausalLM
from torch import Tensor

from coterie.errors import CoterieError

REFUSED = {
    "assistant_model": "with an assistant model",
    "is_assistant": "as another model's assistant",
    "prompt_lookup_num_tokens": "with prompt lookup",
    "cache_implementation": "with a cache of a fixed size",
    "past_key_values": "on from a cache (past_key_values)",
    "inputs_embeds": "from inputs_embeds",
}
"""Options of `generate` that PEFT's prompts do not work with, and what they are for."""


class PromptModel(PeftModelForCausalLM):
    """Counts positions without padding when it writes, and refuses what PEFT leaves out.

    PEFT takes no positions, so padding between the prompt and a text would move the text; it puts
    the prompt before what continues a cache; and a draft's tokens are cut to the last one.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """As PEFT's: of tokens (batch, time), mask 0 where they are padded, at their ends only.

        Raises CoterieError for padding before a text, positions and caches.
        """
        padded = attention_mask is not None and not attention_mask[:, 0].all()
        if padded or any(kwargs.get(k) is not None for k in ("position_ids", "past_key_values")):
            raise CoterieError(
                "A model with a soft prompt takes no padding before a text, no position_ids and no "
                "past_key_values. Pad at the end, or use its generate(), which takes padding "
                "before a text."
            )
        return super().forward(input_ids, attention_mask, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' models: padding is before the texts, mask 0.

        Raises CoterieError for what PEFT gets wrong; see REFUSED.
        """
        config = kwargs.get("generation_config") or self.generation_config
        for option, how in REFUSED.items():
            value = kwargs.get(option, getattr(config, option, None))
            grows = option == "cache_implementation" and "static" not in (value or "")
            if value is not None and not grows:
                raise CoterieError(
                    f"A model with a soft prompt cannot generate {how}; generate without that."
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Position ids are not supported")
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """PEFT's, with the positions that it drops."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        mask = inputs.get("attention_mask")
        if mask is not None and "position_ids" in inputs:
            read = inputs.get("inputs_embeds")
            read = inputs["input_ids"] if read is None else read
            positions = mask.long().cumsum(-1) - 1
            inputs["position_ids"] = positions[:, -read.shape[1] :]
        return inputs


PromptModel.__name__ = PeftModelForCausalLM.__name__  # by which transformers' pipelines know it
