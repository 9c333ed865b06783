"""Methods on the architectures that people bring, each on a small random model, from end to end."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, small_model
from every_method import METHODS, marks
from torch import Tensor

import coterie
from coterie.adapters import Parameter
from coterie.bases import load_tokenizer
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.losses.tokens import language_model_loss
from coterie.methods.tensors import copied
from coterie.runs import RunFolder
from coterie.testing.rounds import take

TOLD = ("comigs-1g1s", "fedit", "fedamole", "pcl-2")
SETTINGS = {name: METHODS[name] for name in TOLD} | {
    "comigs-1g1s": {"name": "comigs-1g1s", "router": {"every": 3, "steps": 2}}
}

TRAINING = {"steps": 5, "batch": 4, "precision": "fp32", "learning_rate": 0.02}
OPTIMISER = {"name": "adamw", "weight_decay": 0}  # so that only a gradient changes a value


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


def folder_of(folders: Path, name: str) -> Path:
    """Return the folder of a base."""
    folder = folders / name
    if not folder.exists():
        tokenizer = load_tokenizer("tiny-gpt2")
        ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
        small_model(name, vocab_size=len(tokenizer), **ids).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


CASES = [(architecture, method) for architecture in ARCHITECTURES for method in TOLD]
SLOW = {(name, TOLD[number % len(TOLD)]) for number, name in enumerate(ARCHITECTURES)}
SLOW |= {case for case in CASES if case[0] in ("gpt2", "llama", "mixtral", "falcon_h1")}
"""One method on each architecture, and all methods on four; the other cases are thorough."""


@pytest.mark.parametrize(
    ("architecture", "method"), [pytest.param(*case, marks=marks(case, (), SLOW)) for case in CASES]
)
def test_it_trains(architecture, method, folders, config, tmp_path) -> None:
    limits = dict.fromkeys(("train", "validation", "test"), 81)
    changes = {"data": {"window": 16, "limits": limits}, "evaluation": {"keep": "last"}}
    changes |= {"training": {**TRAINING, "optimiser": OPTIMISER}, "method": SETTINGS[method]}
    run = config(base=str(folder_of(folders, architecture)), rounds=2, **changes)
    session = Session(run, threads=1)
    folder = RunFolder.create(tmp_path / "run", session.description(run, session.participants(run)))
    local = session.start(run, folder)
    [first, *_] = session.participants(run)
    text = first.data.train.ids.long().view(3, 27)
    before = loss(local, first.name, text)
    start = {n: copied(values(client.parameters())) for n, client in local.clients.items()}
    local.run()
    assert loss(local, first.name, text) < before
    for name, client in local.clients.items():
        for tensor, value in values(client.parameters()).items():
            assert not torch.equal(value, start[name].get(tensor, torch.zeros_like(value))), tensor
    take(local)
    if method != "pcl-2":  # in which everybody has a mean of their own
        equal_where_shared(local)
    for name, client in local.clients.items():
        client.restore(folder.load(f"client-{name}"))
        want = client.model()(text).logits
        torch.testing.assert_close(coterie.load(folder.path, name)(text).logits, want)


def loss(local: LocalRun, name: str, ids: Tensor) -> float:
    """Return a client's loss on a batch."""
    with torch.no_grad():
        return language_model_loss(local.clients[name].model(), ids).item()


def values(parts: Mapping[str, Parameter]) -> dict[str, Tensor]:
    return {name: part.tensor.detach() for name, part in parts.items()}


def equal_where_shared(local: LocalRun) -> None:
    """Check that all clients have equal values of the parameters that are sent."""
    arrived: dict[str, Tensor] = {}
    for client in local.clients.values():
        shared = {n: p for n, p in client.parameters().items() if local.config.method.shared(p)}
        assert shared
        for name, part in shared.items():
            assert torch.equal(arrived.setdefault(name, part.tensor.detach()), part.tensor)
