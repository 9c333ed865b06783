"""Bundles: the adapter with its layout, for any method; loaded by Coterie without the run."""

from dataclasses import replace
from pathlib import Path
from shutil import copyfile

from coterie.adapters.portable import packed
from coterie.bases.lora import FILES
from coterie.evaluation.gate import GATE
from coterie.exports.format import Format
from coterie.exports.source import Source
from coterie.files import expanded
from coterie.inference.bundle import ADAPTER, BASE_ADAPTER


def _write(source: Source, folder: Path) -> None:
    if source.adapter is not None:
        state = packed(source.adapter)
        if source.gate is not None:
            state = replace(state, parts={**state.parts, GATE: source.gate.state()})
        (folder / ADAPTER).write_bytes(state.encode())
    if source.spec.adapter is not None:
        merged = source.config.root / expanded(source.spec.adapter)
        (folder / BASE_ADAPTER).mkdir()
        for name in FILES:
            copyfile(merged / name, folder / BASE_ADAPTER / name)


def _usage(source: Source, folder: str, base: str) -> str:
    """Return the code; `base` is named only if Coterie cannot find the base by its name."""
    option = "" if base == source.public.name else f", base={base!r}"
    return (
        "import coterie\n\n"
        f"model = coterie.load({folder!r}{option})\n"
        f"tokenizer = coterie.tokenizer({folder!r})\n"
    )


def _notes(source: Source) -> list[str]:
    name = source.public.name
    text = f"The bundle needs Coterie, and its base {name}, which the folder does not contain"
    if name == source.spec.name:
        return [f"{text}."]
    return [f"{text}: pass the folder of the base as `base` to coterie.load."]


BUNDLE = Format(
    name="bundle",
    content="a bundle, which Coterie loads without the run",
    library="coterie",
    refusal=lambda source: None,
    write=_write,
    usage=_usage,
    notes=_notes,
    alone=False,
)
