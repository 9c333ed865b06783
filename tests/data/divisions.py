"""Divisions of a data set, as the tests of the division make them and look at them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coterie.data.division.divide import Division, divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.spec import DataSpec
from coterie.data.texts import Texts


def divide(root: Path, data: DataSpec | None = None, seed: int = 0, **options: Any) -> Division:
    """Divide records.jsonl, unless the options name another source."""
    spec = DivideSpec.model_validate({"source": "records.jsonl", **options})
    return divided_texts(spec, data or DataSpec(), root, seed)


def items(*texts: Texts[Any]) -> list[Any]:
    """Return what all splits contain."""
    return [item for each in texts for split in vars(each).values() for item in split]


def labels(texts: Iterable[str]) -> Counter[str]:
    """Count the first words of texts, which are their labels."""
    return Counter(text.split()[0] for text in texts)


def public_of(divided: Division) -> Texts[Any]:
    """Return the public set of a division that has one."""
    assert divided.public is not None
    return divided.public
