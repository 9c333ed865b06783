"""The header of a GGUF file, read without trusting the lengths that it states.

The package gguf reads as many items of an array as the header states, even after the end of the
file.
"""

from pathlib import Path
from struct import calcsize, unpack
from typing import IO, Any

from coterie.files import open_file

FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The formats of numbers, as in the module struct; the keys are the numbers of types in GGUF."""
TEXT, ARRAY = 8, 9
"""The numbers of the other types in GGUF."""
MIN_BYTES = {TEXT: 8, ARRAY: 12}
"""The sizes of an empty text and an empty array in bytes."""
MAX_NESTED = 4
"""The highest accepted number of arrays within arrays."""


def read_header(file: Path) -> dict[str, Any]:
    """Read the fields of a GGUF file's header that are numbers or lists of numbers.

    Raises:
        ValueError: The header is damaged, or states a length that exceeds the file.
    """
    with open_file(file) as opened:
        header = _Header(opened, file.stat().st_size)
        return header.fields()


class _Header:
    """A GGUF file at some position of its header."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size, self.order = file, size, "<"

    def fields(self) -> dict[str, Any]:
        """Read all fields."""
        if self.file.read(4) != b"GGUF":
            raise ValueError("GGUF magic invalid")
        if self.number("I") % 2**16 == 0:
            self.order = ">"
        self.number("Q")  # the number of tensors
        values: dict[str, Any] = {}
        for _ in range(self.number("Q")):
            key = self.text().decode()
            value = self.value(self.number("I"))
            if value is not None:
                values[key] = value
        return values

    def number(self, format: str) -> Any:
        """Read a number in a format of the module struct."""
        size = calcsize(format)
        return unpack(self.order + format, self.file.read(self.fitting(1, size)))[0]

    def text(self) -> bytes:
        """Read a text."""
        return self.file.read(self.fitting(self.number("Q"), 1))

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value, and return it if it is a number or a list of numbers."""
        if kind == TEXT:
            self.text()
            return None
        if kind != ARRAY:
            if kind not in FORMATS:
                raise ValueError(f"its header has a value of the unknown type {kind}")
            return self.number(FORMATS[kind])
        item, count = self.number("I"), self.number("Q")
        size = calcsize(FORMATS[item]) if item in FORMATS else MIN_BYTES.get(item, 1)
        self.fitting(count, size)
        if depth > MAX_NESTED:
            raise ValueError("its header has too many arrays within arrays")
        return [value for _ in range(count) if (value := self.value(item, depth + 1)) is not None]

    def fitting(self, count: int, size: int) -> int:
        """Return the total size of items in bytes, or raise ValueError if it exceeds the file."""
        if count * size > self.size - self.file.tell():
            raise ValueError("it ends within its header, or its header states a wrong length")
        return count * size
