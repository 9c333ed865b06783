"""A mailbox with a running server, for the tests of the network."""

from collections.abc import Iterator
from pathlib import Path

import mail
import pytest


@pytest.fixture
def post(tmp_path: Path) -> Iterator[mail.Post]:
    with mail.post(tmp_path) as running:
        yield running
