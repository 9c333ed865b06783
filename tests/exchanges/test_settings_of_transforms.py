"""Settings of transforms are what acts: each one is changed, and something else comes out."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from both_ends import exchange_of
from pydantic import BaseModel

from coterie.exchanges.exchange import Exchange
from coterie.exchanges.weights import TOKENS, TokenWeights
from coterie.messages import Field, Groups, Message, Schema
from coterie.messages.schema import Reduce
from coterie.transforms.contract import Transform
from coterie.transforms.registry import OWN, TRANSFORMS
from coterie.turn import Turn

SCHEMA = Schema(up=tuple(Field(group, "numbers", reduce="mean") for group in ("adapter", "logits")))
SHAPES = {"adapter": {"x": (6,)}, "logits": {"y": (4,)}}
ADAM = {"name": "fedadam"}
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "bounds.largest_change": ({}, 1.1),
    "bounds.largest_norm": ({}, 1.1),
    "bounds.largest_weight": ({}, 1.1),
    "trimmed_mean.trim": ({}, 0.4),
    "server_optimiser.optimiser.name": ({"optimiser": ADAM}, "fedyogi"),
    "server_optimiser.optimiser.learning_rate": ({"optimiser": ADAM}, 0.5),
    "server_optimiser.optimiser.momentum": ({"optimiser": ADAM}, 0.5),
    "server_optimiser.optimiser.beta2": ({"optimiser": ADAM}, 0.5),
    "server_optimiser.optimiser.tau": ({"optimiser": ADAM}, 0.5),
}
"""By transform and setting: the settings with which it acts, and another value."""


def settings_of(kind: type[BaseModel], before: str) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from settings_of(section, f"{before}.{name}")
        else:
            yield f"{before}.{name}"


SETTINGS = [path for name in OWN for path in settings_of(TRANSFORMS.get(name), name)]


def outcome(transform: Transform) -> Groups:
    """What three exchanges of five unlike clients come to."""
    weights = [] if isinstance(transform, TokenWeights) else [TokenWeights()]
    exchange = exchange_of(SCHEMA, transform, *weights, exchanges=3)
    chance = torch.Generator().manual_seed(0)
    before: Groups = {"adapter": {"x": torch.zeros(6)}}
    mean: Groups = {}
    for number in range(3):
        uploads: dict[str, Message] = {}
        for size, name in enumerate("abcde", 3):
            groups = {
                group: {n: size * torch.rand(s, generator=chance) for n, s in shapes.items()}
                for group, shapes in SHAPES.items()
            }
            uploads[name] = Message(number, groups, {TOKENS.name: size * size})
        mean = exchanged(exchange, number, uploads, before)
        before = {"adapter": mean["adapter"]}
    return mean


def exchanged(
    exchange: Exchange, number: int, uploads: Mapping[str, Message], before: Groups
) -> Groups:
    """What the server makes of an exchange's uploads."""
    exchange.transforms.begin(number, "train", uploads)
    exchange.open(Turn(number, number, number), uploads)
    exchange.begin()
    for name, upload in uploads.items():
        exchange.transforms.join(name, upload)
        exchange.put(name, upload, lambda *_: before)
    exchange.settle()
    mean = {group: exchange.mean(group, before.get(group)) for group in SHAPES}
    exchange.transforms.commit(())
    return mean


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_acts(path: str) -> None:
    name, *sections, setting = path.split(".")
    given, value = ROWS[path]
    changed: dict[str, Any] = {key: dict(of) for key, of in given.items()}
    inner = changed
    for section in sections:
        inner = inner[section]
    inner[setting] = value
    kind = TRANSFORMS.get(name)
    one, again, other = (outcome(kind.model_validate(v)) for v in (given, given, changed))
    assert same(one, again)
    assert not same(one, other)


@pytest.mark.parametrize("name", OWN)
def test_every_transform_acts(name: str) -> None:
    given = {"optimiser": ADAM} if name == "server_optimiser" else {}
    given = {"largest_change": 1.1} if name == "bounds" else given
    without = Uniform() if name == "tokens" else Nothing()
    assert not same(outcome(TRANSFORMS.get(name).model_validate(given)), outcome(without))


def test_every_row_is_of_a_setting() -> None:
    assert ROWS.keys() == set(SETTINGS)


class Nothing(Transform):
    """A transform that changes nothing."""

    name: ClassVar[str] = "nothing"
    summary: ClassVar[str] = "nothing"
    reductions: ClassVar[frozenset[Reduce]] = frozenset()


class Uniform(TokenWeights):
    """All clients count alike."""

    def weight(self, client: str, upload: Message, joined: Any) -> float:
        return 1.0


def same(one: Groups, other: Groups) -> bool:
    return all(torch.equal(t, other[g][n]) for g, named in one.items() for n, t in named.items())
