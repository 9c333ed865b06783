"""PEFT's model of a base with a soft prompt, corrected where PEFT would silently be wrong."""

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
    "past_key_values": "by continuing from a cache (past_key_values)",
    "inputs_embeds": "from inputs_embeds",
}
"""Options of `generate` that PEFT does not support with soft prompts. The values are the words that
describe the options in the error message."""


class PromptModel(PeftModelForCausalLM):
    """PEFT's model for a base and a soft prompt, corrected in two respects.

    First, generation uses position ids that do not count padding. PEFT ignores position ids, so in
    PEFT's model, padding between the prompt and the text shifts the positions of the text's tokens.

    Second, options that PEFT does not support raise errors. Without these errors, PEFT would insert
    the prompt a second time when generation continues from a cache, and would read only the last
    token when an assistant model drafts several tokens.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run PEFT's forward pass on texts that are padded only at the end.

        Args:
            input_ids: (batch, time), token ids.
            attention_mask: (batch, time), 0 for padding.
            **kwargs: Further arguments of PEFT's model.

        Raises:
            CoterieError: There is padding before a text, or the arguments contain position ids or a
                cache.
        """
        padded = attention_mask is not None and not attention_mask[:, 0].all()
        if padded or any(kwargs.get(k) is not None for k in ("position_ids", "past_key_values")):
            raise CoterieError(
                "A model with a soft prompt accepts no padding before a text, no position_ids and "
                "no past_key_values. Pad at the end, or call generate(), which accepts padding "
                "before a text."
            )
        return super().forward(input_ids, attention_mask, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens, like the method `generate` of a transformers model.

        If the texts of a batch have different lengths, they must be padded at the start. (For
        `forward`, they must be padded at the end.)

        Raises:
            CoterieError: The arguments contain an option that PEFT does not support; see `REFUSED`.
        """
        config = kwargs.get("generation_config") or self.generation_config
        for option, purpose in REFUSED.items():
            value = kwargs.get(option, getattr(config, option, None))
            grows = option == "cache_implementation" and "static" not in (value or "")
            if value is not None and not grows:
                raise CoterieError(
                    f"A model with a soft prompt cannot generate {purpose}; remove {option}."
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Position ids are not supported")
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the inputs of a generation step.

        Unlike PEFT's method, this method does not count padding in position ids.
        """
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        mask = inputs.get("attention_mask")
        if mask is not None and "position_ids" in inputs:
            read = inputs.get("inputs_embeds")
            read = inputs["input_ids"] if read is None else read
            positions = mask.long().cumsum(-1) - 1
            inputs["position_ids"] = positions[:, -read.shape[1] :]
        return inputs


# The pipelines of transformers check the class name.
PromptModel.__name__ = PeftModelForCausalLM.__name__
