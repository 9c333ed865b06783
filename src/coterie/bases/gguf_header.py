"""The header of a GGUF file, read without trusting the lengths that it states.

The package gguf reads as many items of an array as the header states, even after the end of the
file.
"""

from pathlib import Path
from struct import calcsize, unpack
from typing import IO, Any, NamedTuple

from coterie.files import open_file

FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The formats of numbers, as in the module struct; the keys are the numbers of types in GGUF."""
TEXT, ARRAY = 8, 9
"""The numbers of the other types in GGUF."""
MIN_BYTES = {TEXT: 8, ARRAY: 12}
"""The sizes of an empty text and an empty array in bytes."""
MAX_NESTED = 4
"""The highest accepted number of arrays within arrays."""


class Header(NamedTuple):
    """The header of a GGUF file."""

    fields: dict[str, Any]
    """The value of each key: a number, a text or a list."""
    tensors: dict[str, tuple[int, ...]]
    """The shape of each tensor, with the axes in the order of PyTorch."""

    @property
    def architecture(self) -> str:
        """The name of the model's architecture, with which the keys of its settings begin."""
        return self.fields["general.architecture"]


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        ValueError: The header is damaged, or states a length that exceeds the file.
    """
    with open_file(file) as opened:
        return _Reader(opened, file.stat().st_size).header()


class _Reader:
    """A GGUF file at some position of its header."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size, self.order = file, size, "<"

    def header(self) -> Header:
        """Read the whole header."""
        if self.file.read(4) != b"GGUF":
            raise ValueError("GGUF magic invalid")
        if self.number("I") % 2**16 == 0:
            self.order = ">"
        tensors, keys = self.number("Q"), self.number("Q")
        fields = {self.text(): self.value(self.number("I")) for _ in range(keys)}
        return Header(fields, dict(self.tensor() for _ in range(tensors)))

    def tensor(self) -> tuple[str, tuple[int, ...]]:
        """Read the name and the shape of a tensor."""
        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        self.number("I")  # the format
        self.number("Q")  # the position in the file
        return name, tuple(reversed(shape))

    def number(self, format: str) -> Any:
        """Read a number in a format of the module struct."""
        size = calcsize(format)
        return unpack(self.order + format, self.file.read(self.fitting(1, size)))[0]

    def text(self) -> str:
        """Read a text."""
        return self.file.read(self.fitting(self.number("Q"), 1)).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a number, a text or a list."""
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            if kind not in FORMATS:
                raise ValueError(f"its header has a value of the unknown type {kind}")
            return self.number(FORMATS[kind])
        item, count = self.number("I"), self.number("Q")
        size = calcsize(FORMATS[item]) if item in FORMATS else MIN_BYTES.get(item, 1)
        self.fitting(count, size)
        if depth > MAX_NESTED:
            raise ValueError("its header has too many arrays within arrays")
        return [self.value(item, depth + 1) for _ in range(count)]

    def fitting(self, count: int, size: int) -> int:
        """Return the total size of items in bytes, or raise ValueError if it exceeds the file."""
        if count * size > self.size - self.file.tell():
            raise ValueError("it ends within its header, or its header states a wrong length")
        return count * size
