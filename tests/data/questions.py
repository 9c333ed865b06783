"""Records of prompts with answers, as the data room's tests write and read them."""

import json
from pathlib import Path
from typing import Any

from coterie.data.examples import Examples
from coterie.data.files import Record
from coterie.data.spec import InstructionSpec

SHORT = InstructionSpec(template="{{ input }}:")


def records(*fields: dict[str, Any]) -> list[Record]:
    return [Record(f"line {n} of x.jsonl", f) for n, f in enumerate(fields, start=1)]


def write(file: Path, *fields: dict[str, Any]) -> None:
    file.write_text("\n".join(map(json.dumps, fields)))


def rows(count: int, instruction: str = "Yes or no?", start: int = 0) -> list[dict[str, Any]]:
    return [
        {"instruction": instruction, "input": f"case {i}", "output": ("yes", "no")[i % 2]}
        for i in range(start, start + count)
    ]


def data_of(split: Any) -> Examples:
    assert isinstance(split, Examples)
    return split
