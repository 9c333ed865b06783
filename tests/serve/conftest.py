"""Finished runs whose models differ, and a server for them in this process."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import chat_values, served

import coterie
from coterie.serve.models import Models


@pytest.fixture(scope="session")
def talks(tmp_path_factory) -> Path:
    """A finished run on conversations, with baselines."""
    folder = tmp_path_factory.mktemp("serve") / "talks"
    coterie.run(chat_values(), out=folder)
    return folder


@pytest.fixture(scope="session")
def prompts(values, tmp_path_factory) -> Path:
    """A finished run on plain text whose adapters are soft prompts."""
    folder = tmp_path_factory.mktemp("serve") / "prompts"
    changes = {"training": {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.1}}
    changes |= {"method": {"name": "fedprompt", "virtual_tokens": 5}}
    changes |= {"evaluation": {"keep": "last"}}
    coterie.run(values(rounds=1, **changes), out=folder)
    return folder


@pytest.fixture(scope="session")
def models(talks, prompts) -> Models:
    return Models([talks, prompts])


@pytest.fixture(scope="session")
def server(models) -> Iterator[httpx.Client]:
    """A client of a server without keys."""
    with served(models) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client
