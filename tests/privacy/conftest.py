"""A method whose clients put noise on what they upload about their samples."""

from collections.abc import Callable

import pytest

import coterie


@pytest.fixture
def noisy(config) -> Callable[..., coterie.RunConfig]:
    """A run with a privacy budget, or without noise."""

    def make(epsilon: float | None) -> coterie.RunConfig:
        embeddings = {"privacy": {"epsilon": epsilon} if epsilon else None}
        method = {"name": "fedamole", "experts": 6, "attention": {"rank": 4}}
        return config(method={**method, "embeddings": embeddings})

    return make
