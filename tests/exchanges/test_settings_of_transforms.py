"""Settings of aggregation are what acts: each one is changed, and something else comes out."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args

import pytest
import torch
from both_ends import exchange_of
from pydantic import BaseModel
from tensors import equal

from coterie.exchanges.exchange import Exchange
from coterie.exchanges.spec import AggregationSpec
from coterie.exchanges.weights import TOKENS
from coterie.messages import Field, Groups, Message, Schema
from coterie.transforms.contract import Transform
from coterie.transforms.registry import OWN, TRANSFORMS
from coterie.turn import Turn

SCHEMA = Schema(up=tuple(Field(group, "numbers", reduce="mean") for group in ("adapter", "logits")))
SHAPES = {"adapter": {"x": (6,)}, "logits": {"y": (4,)}}
ADAM = {"optimiser": {"name": "fedadam"}}
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "aggregation.largest_change": ({}, 1.1),
    "aggregation.largest_norm": ({}, 1.1),
    "aggregation.largest_weight": ({"weights": "tokens"}, 1.1),
    "aggregation.weights": ({}, "tokens"),
    "aggregation.optimiser.name": (ADAM, "fedyogi"),
    **{
        f"aggregation.optimiser.{setting}": (ADAM, 0.5)
        for setting in ("learning_rate", "momentum", "beta2", "tau")
    },
    "aggregation.least_others": ({}, 5),
    "aggregation.transforms": ({}, [{"name": "median"}]),
    "trimmed_mean.trim": ({}, 0.4),
}
"""The settings with which a setting acts, and its other value, by section or transform."""


def settings_of(kind: type[BaseModel], before: str) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        sections = [a for a in (info.annotation, *get_args(info.annotation)) if isinstance(a, type)]
        models = [section for section in sections if issubclass(section, BaseModel)]
        if models and info.default != ():
            yield from settings_of(models[0], f"{before}.{name}")
        else:
            yield f"{before}.{name}"


KINDS = {"aggregation": AggregationSpec, **{name: TRANSFORMS.get(name) for name in OWN}}
SETTINGS = [path for name, kind in KINDS.items() for path in settings_of(kind, name)]


def outcome(rules: AggregationSpec, *transforms: Transform) -> Groups:
    """Return the results of three exchanges of five different clients."""
    listed = [TRANSFORMS.get(spec.name).model_validate(spec.settings) for spec in rules.transforms]
    exchange = exchange_of(SCHEMA, *transforms, *listed, rules=rules, exchanges=3)
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


def exchanged(exchange: Exchange, number: int, uploads: Any, before: Groups) -> Groups:
    """Return the server's result of an exchange."""
    exchange.open(Turn(number, number, number), uploads)
    exchange.begin()
    for name, upload in uploads.items():
        exchange.join(name, upload)
        exchange.put(name, upload, lambda *_: before)
    exchange.settle()
    mean = {group: exchange.mean(group, before.get(group)) for group in SHAPES}
    exchange.transforms.commit(())
    return mean


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_acts(path: str) -> None:
    name, *sections, setting = path.split(".")
    given, value = ROWS[path]
    changed = deepcopy(given)
    inner = changed
    for section in sections:
        inner = inner[section]
    inner[setting] = value
    if name == "aggregation":
        first, again, other = (outcome(AggregationSpec(**v)) for v in (given, given, changed))
    else:
        kinds = (TRANSFORMS.get(name).model_validate(v) for v in (given, given, changed))
        first, again, other = (outcome(AggregationSpec(), transform) for transform in kinds)
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize("name", OWN)
def test_every_transform_acts(name: str) -> None:
    plain = outcome(AggregationSpec())
    assert not same(outcome(AggregationSpec(), TRANSFORMS.get(name)()), plain)


def test_an_optimiser_acts() -> None:
    assert not same(outcome(AggregationSpec.model_validate(ADAM)), outcome(AggregationSpec()))


def test_every_row_is_of_a_setting() -> None:
    assert ROWS.keys() == set(SETTINGS)


def same(first: Groups, other: Groups) -> bool:
    names = [{g: {*tensors} for g, tensors in each.items()} for each in (first, other)]
    return names[0] == names[1] and all(equal(first[g], other[g]) for g in first if first[g])
