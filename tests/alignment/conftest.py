"""Vocabularies for tests of maps."""

from collections.abc import Callable

import pytest

from coterie.alignment import Vocabulary


@pytest.fixture
def vocabulary() -> Callable[..., Vocabulary]:
    """Makes a vocabulary of some tokens; keyword arguments are its roles."""
    return lambda *tokens, **roles: Vocabulary(tokens, roles)
