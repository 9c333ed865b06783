"""Merged models: the base's own architecture, with the update added to the weights."""

from pathlib import Path

from coterie.adapters.full import FullAdapter
from coterie.adapters.merging import merge
from coterie.exports.format import Format
from coterie.exports.source import Source


def _refusal(source: Source) -> str | None:
    if source.spec.quantised:
        return "an update cannot be added exactly to quantised weights"
    if source.adapter is None or source.plain or isinstance(source.adapter, FullAdapter):
        return None
    return "an update can be added to the weights only if each linear layer has one LoRA pair"


def _write(source: Source, folder: Path) -> None:
    model = source.attach()
    merge(model)
    model.save_pretrained(folder)


def usage(source: Source, folder: str, base: str) -> str:
    """Return the code that loads a transformers folder."""
    del source, base
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({folder!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})\n"
    )


def rounding_note() -> str:
    """Return a sentence on the number format of merged weights."""
    return "Weights are in float32; in bfloat16, part of a small update would be lost by rounding."


def _notes(source: Source) -> list[str]:
    if source.adapter is None:
        return ["No round was better than the untrained base, so the model is the base itself."]
    return [rounding_note()]


MERGED = Format(
    name="merged",
    content="a transformers model with the update merged into its weights",
    library="transformers",
    refusal=_refusal,
    write=_write,
    usage=usage,
    notes=_notes,
)
