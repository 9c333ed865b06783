"""A data set hub that is not asked over the network."""

from collections.abc import Callable
from typing import Any

import datasets
import pytest


@pytest.fixture
def hub(monkeypatch) -> Callable[..., list[tuple[str, ...]]]:
    """A function that sets the columns of each split, and returns the list of later requests."""

    def serve(columns: Callable[[str], Any], features: Any = None) -> list[tuple[str, ...]]:
        asked: list[tuple[str, ...]] = []

        def load(*names: str, split: str) -> datasets.Dataset:
            asked.append((*names, split))
            return datasets.Dataset.from_dict(columns(split), features)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return serve
