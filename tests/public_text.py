"""The public text as a run reads it."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from coterie.data.spec import DataSpec
from coterie.data.split import Split
from coterie.data.texts import whole_text
from coterie.data.tokens import encoded


def public_text(data: DataSpec, root: Path, tokenizer: PreTrainedTokenizerBase) -> Split:
    owner = "The public text"
    assert data.public is not None
    return encoded(whole_text(data.public, data, root, owner), tokenizer, data, "public", owner)
