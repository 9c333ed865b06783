"""The export of a client's model: choose a format, write a folder, and compare the outputs."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from safetensors import SafetensorError

from coterie.errors import CoterieError, Unwritable
from coterie.exports.bundle import BUNDLE
from coterie.exports.card import model_card
from coterie.exports.format import Format
from coterie.exports.gguf import GGUF
from coterie.exports.hub import push as upload
from coterie.exports.merged import MERGED
from coterie.exports.moe import MOE
from coterie.exports.parity import Parity, measure, reference
from coterie.exports.peft import PEFT
from coterie.exports.source import Source, open_source
from coterie.files import sync, write_folder, writing
from coterie.inference.bundle import DESCRIPTION, FORMAT
from coterie.messages.formats import VERSION
from coterie.methods.contract import Method
from coterie.runs import read

FORMATS = {format.name: format for format in (PEFT, MERGED, MOE, BUNDLE, GGUF)}
"""The formats in the order in which `auto` tries them."""
AUTO = "auto"
TOLERANCE = 5e-5
"""The largest permitted difference of logits, as a share of the largest logit."""
QUANTISED = 0.02
"""The share for a quantised base, on which kernels of bitsandbytes may compute in bfloat16."""


@dataclass(frozen=True)
class Exported:
    """A folder with an exported model."""

    path: Path
    format: str
    content: str
    """A description of the folder, such as "a PEFT adapter"."""
    reason: str | None
    """The reasons why `auto` chose no earlier format; None if it chose the first one."""
    difference: float | None
    """The largest difference between the logits of the exported and of the trained model.

    It is None if no installed tool can load the folder.
    """
    largest: float
    """The largest absolute logit of the trained model."""
    tool: str | None
    """The tool that loaded the folder for the comparison; None if no installed tool can."""
    notes: tuple[str, ...]
    """Sentences that the user of the folder should know."""
    url: str | None = None
    """The address on the Hugging Face hub if the folder was uploaded."""


def export(
    run: str | os.PathLike[str],
    client: str,
    to: str | os.PathLike[str],
    *,
    format: str = AUTO,
    method: Method | None = None,
    force: bool = False,
    push: str | None = None,
) -> Exported:
    """Export a client's model into a folder, in a format that represents it exactly.

    The folder is loaded again, if possible in another process, and its logits for 64 tokens are
    compared with those of the trained model. If they differ by more than rounding error, nothing is
    exported.

    Args:
        run: The run folder, or a finished `Run`.
        client: The client's name, or "server" for the server's own model.
        to: The folder to create.
        format: "peft" (an adapter for PEFT), "merged" (a transformers model with the update in its
            weights), "moe" (a mixture-of-experts checkpoint), "bundle" (a folder for
            `coterie.load`), "gguf" (a file for llama.cpp and Ollama), or "auto", which chooses the
            first of them that is exact.
        method: The run's method, if its class is not registered.
        force: Whether to replace an earlier export in the folder.
        push: A name on the Hugging Face hub, such as "anna/model", to which the folder is uploaded.
            A repository that does not exist is created as a private one.

    Returns:
        The format, the folder and the measured difference.

    Raises:
        CoterieError: The run is not finished or has no such client, the format cannot represent the
            model exactly, the folder exists, a file cannot be written, or the upload failed.
    """
    path = Path(to).absolute()
    if format not in (AUTO, *FORMATS):
        raise CoterieError(
            f"There is no format {format!r}; choose one of {', '.join((AUTO, *FORMATS))}."
        )
    _check_folder(path, force)
    source = open_source(Path(run), client, method)
    chosen, reason = _choose(source, format)
    notes = chosen.remarks(source)
    ids, logits = reference(source)
    parities: list[Parity | None] = []

    def fill(folder: Path) -> None:
        with _disk_errors(path):
            chosen.write(source, folder)
            source.tokenizer.save_pretrained(folder)
        (folder / DESCRIPTION).write_text(json.dumps(_description(source, chosen), indent=2))
        parity = measure(chosen, source, folder, ids, logits)
        if parity is not None:
            _check(chosen, QUANTISED if source.spec.quantised else TOLERANCE, parity)
        card = model_card(source, chosen, parity, path.name)
        (folder / "README.md").write_text(card, encoding="utf-8")
        parities.append(parity)

    _replace(path, fill)
    [parity] = parities
    url = None if push is None else upload(path, push)
    largest = logits.abs().max().item() if parity is None else parity.largest
    difference, tool = (None, None) if parity is None else (parity.difference, parity.tool)
    return Exported(
        path, chosen.name, chosen.content, reason, difference, largest, tool, notes, url
    )


def _choose(source: Source, name: str) -> tuple[Format, str | None]:
    """Return the format for a model, and the reason why no earlier format was chosen."""
    refusals = {format.name: format.refusal(source) for format in FORMATS.values()}
    exact = [name for name, refusal in refusals.items() if refusal is None]
    if name == AUTO:
        before = list(refusals)[: list(refusals).index(exact[0])]
        earlier = [f"not {name}, because {refusals[name]}" for name in before]
        return FORMATS[exact[0]], "; ".join(earlier) or None
    if (refusal := refusals[name]) is not None:
        formats = "the exact format is" if len(exact) == 1 else "exact formats are"
        raise CoterieError(
            f"The model cannot be exported as {name}, because {refusal}; {formats} "
            f"{' and '.join(exact)}."
        )
    return FORMATS[name], None


def _check(format: Format, tolerance: float, parity: Parity) -> None:
    """Raise CoterieError if the exported model computes something else than the trained model."""
    if not parity.difference <= tolerance * parity.largest:
        hint = "" if format.name == BUNDLE.name else "; try --format bundle"
        raise CoterieError(
            f"The logits of the exported and the trained model differ by up to "
            f"{parity.difference:.2g} (the largest logit is {parity.largest:.3g}), so nothing was "
            f"exported as {format.name}{hint}."
        )


def _description(source: Source, format: Format) -> dict[str, Any]:
    """Return the content of coterie.json."""
    return {
        "format": FORMAT,
        "coterie": VERSION,
        "export": format.name,
        "method": source.config.label,
        "base": source.public.model_dump(),
        "digest": source.digest,
        "precision": source.precision,
        "window": source.config.data.window,
    }


def _check_folder(path: Path, force: bool) -> None:
    """Raise CoterieError if a folder cannot become an export."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        read.read_json(path, DESCRIPTION)["export"]
    except (CoterieError, KeyError):
        raise CoterieError(
            f"{path} exists and is not an export; choose another folder with --to."
        ) from None
    if not force:
        raise CoterieError(
            f"{path} already contains an export; choose another folder with --to, or replace the "
            "export with --force."
        )


def _replace(path: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically; an earlier export is deleted only when the new one is complete.

    Args:
        path: The folder.
        fill: Function that writes the files into a temporary folder, its argument.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent)) / "earlier"

    def fill_and_move(folder: Path) -> None:
        fill(folder)
        for file in folder.rglob("*"):
            sync(file)
        if path.exists():
            path.rename(aside)

    try:
        write_folder(path, fill_and_move)
    except BaseException:
        if aside.exists():
            aside.rename(path)
        raise
    finally:
        rmtree(aside.parent, ignore_errors=True)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raise Unwritable if a library could not write a file, for example because the disk is full.

    The libraries of tensors and tokenizers are written in Rust, and raise no OSError.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or "os error" in str(error):
            raise Unwritable(f"Could not write {path}: {error}.") from error
        raise
