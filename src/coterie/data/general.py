"""The requests and texts for replay: the list that ships with Coterie, or a file."""

from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from coterie.data.files import Record, read_records, resolve
from coterie.errors import CoterieError
from coterie.files import read_file
from coterie.registry import Section

SHIPPED = Path(__file__).parents[1] / "assets" / "general" / "list.jsonl"
"""The requests and texts that ship with Coterie.

Records with `held_out` are not for training; drift is measured on them.
"""
SOURCES = ("list", "sampled")
"""The values of the key `training.replay.text` that are not paths."""


class GeneralText(Section):
    """A request or a text that contains nothing private."""

    request: str | None = Field(default=None, min_length=1, exclude_if=lambda text: text is None)
    """request, which the base answers"""
    text: str | None = Field(default=None, min_length=1, exclude_if=lambda text: text is None)
    """plain text, which is read as it is"""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.request is None) == (self.text is None):
            raise ValueError("set either request or text")
        return self


@cache
def list_digest() -> str:
    """Return a hash of the list that ships with Coterie."""
    return blake2b(read_file(SHIPPED), digest_size=8).hexdigest()


@cache
def shipped(held_out: bool) -> tuple[GeneralText, ...]:
    """Return the requests and texts that ship with Coterie.

    Args:
        held_out: Whether to return those on which drift is measured, or those for training.
    """
    records = read_records(SHIPPED, "training.replay")
    chosen = [record for record in records if record.fields.get("held_out", False) == held_out]
    return tuple(_general_text(record) for record in chosen)


def inlined_texts(name: str, root: Path) -> list[dict[str, Any]]:
    """Read the file of general requests and texts that a run file names.

    Args:
        name: The value of the key `training.replay.text`.
        root: The folder to which a relative path refers.

    Raises:
        CoterieError: The file does not exist, has no records, or has a record that is neither a
            request nor a text.
    """
    key = "training.replay.text"
    file = resolve(root, name)
    if not file.is_file():
        raise CoterieError(
            f"{key}: there is no file {file}; correct the path, or use `list` or `sampled`."
        )
    return [_general_text(record).model_dump() for record in read_records(file, key)]


def _general_text(record: Record) -> GeneralText:
    fields = [name for name in ("request", "text") if name in record.fields]
    if len(fields) != 1 or not record.text(fields).strip():
        raise CoterieError(
            f"{record.where} needs either the field `request` or the field `text`, with a text "
            "that is not blank."
        )
    return GeneralText.model_validate({fields[0]: record.text(fields)})
