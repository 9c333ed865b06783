"""Writing with a client's model."""

from pathlib import Path
from typing import Any

import torch

from coterie.api import load, tokenizer
from coterie.errors import CoterieError


def write(
    run: Path, client: str, prompt: str, tokens: int, temperature: float, top_p: float, seed: int
) -> str:
    """The prompt and what the client's model writes after it, at most `tokens` tokens.

    Temperature 0 takes the likeliest token each time. Raises CoterieError if the prompt and the
    tokens asked for do not fit in the base's context.
    """
    model: Any = load(run, client)
    words: Any = tokenizer(run)
    ids = words(prompt or words.bos_token or words.eos_token, return_tensors="pt")["input_ids"]
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] + tokens > longest:
        raise CoterieError(
            f"The prompt's {ids.shape[1]} tokens and {tokens} more do not fit in the base's "
            f"context of {longest} tokens."
        )
    torch.manual_seed(seed)
    sampling = {"temperature": temperature, "top_p": top_p} if temperature > 0 else {}
    written = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        pad_token_id=words.eos_token_id,
        **sampling,
    )
    return words.decode(written[0], skip_special_tokens=True)
