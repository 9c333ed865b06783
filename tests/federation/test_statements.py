"""The statements on what reaches other clients, against what the server really sends to them."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from every_method import FEW, METHODS, each_method, run_of

from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig, parse
from coterie.engines.local import LocalRun
from coterie.federation import statements as module
from coterie.federation.statements import (
    AVERAGED,
    COMPUTED,
    FORWARDED,
    GENERAL,
    LIMIT,
    PRIVACY,
    SEEN,
    statements,
)
from coterie.messages import Message
from coterie.methods.fedmkt.method import FedMKT
from coterie.methods.registry import available
from coterie.privacy.ledger import Budget
from coterie.privacy.mechanisms import epsilon, noise_for
from coterie.testing.rounds import close, down, joined, step

PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "what-leaves-the-device.md"
HEADING = "## What reaches other clients"
TRANSFORMS = Path(__file__).parents[2] / "examples" / "transforms"
LARGE_MEANS: dict[str, dict[str, int]] = {"fedlease": {"max_clusters": 1}}
LARGE_MEANS |= {"ifca": {"clusters": 1}, "clove": {"clusters": 1}}
LARGE_MEANS["fedamole"] = {"experts": 2, "clients_per_expert": 3, "min_experts": 2}
"""Settings with which every mean is of several clients."""


def facts(config: RunConfig) -> dict[str, str]:
    return dict(statements(config))


def run_with_large_means(method: dict[str, Any], values: Any, teachers: Any) -> RunConfig:
    method = method | LARGE_MEANS.get(method["name"], {})
    if issubclass(available()[method["name"]], FedMKT):
        return teachers(method=method)
    limits = {"train": 20_000, "validation": 400, "test": 400}  # texts differ in their lengths
    changes = {"rounds": 4, "data": {"window": 16, "limits": limits}}
    no_bound = {"largest_change": None}  # halved uploads are not excluded
    return run_of(method, values, teachers, aggregation=no_bound, **changes)


def leaves(value: Any) -> Iterator[Any]:
    """Return the numbers and texts of a JSON value that identify their sender."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif (isinstance(value, int) and value > 99) or (isinstance(value, str) and len(value) > 31):
        yield value


def contents(message: Message) -> Iterator[tuple[str, Any]]:
    """Return the field and a comparable form of each tensor and leaf of a message."""
    for _, group, _, tensor in message.tensors():
        # Integers, such as positions in public texts, can be equal by themselves.
        if tensor.is_floating_point() and tensor.unique().numel() > 1:
            yield group, tensor.half().numpy().tobytes()  # in which auto's server forwards pairs
    for name, value in message.values.items():
        yield from ((name, leaf) for leaf in leaves(value))


def passed_on(local: LocalRun, exchanges: int) -> tuple[set[str], set[str]]:
    """Return the fields in which clients receive values that only other clients have sent.

    Returns:
        The names of the fields of downloads with such values, and the names of those of uploads.
    """
    names, sent = sorted(local.clients), {name: {} for name in local.clients}
    received, uploaded = set[str](), set[str]()

    def compare() -> None:
        for name in names:
            own = sent[name].keys()
            others = {v: field for o in names if o != name for v, field in sent[o].items()}
            for field, value in contents(down(local, name)):
                if value in others and value not in own:
                    received.add(field)
                    uploaded.add(others[value])

    for exchange in range(exchanges):
        local.open(local.config.turn(exchange), names)
        compare()
        uploads = {name: step(local, name, exchange) for name in names}
        for name, upload in uploads.items():
            sent[name] |= {value: field for field, value in contents(upload)}
        close(local, exchange, uploads)
    compare()
    return received, uploaded


@pytest.mark.parametrize("method", each_method(frozenset({*FEW, "auto", "cobo"})))
def test_what_is_passed_on_is_what_other_clients_receive(method, values, teachers) -> None:
    run = run_with_large_means(method, values, teachers)
    received, uploaded = passed_on(joined(run), run.exchanges)
    fields = [field for field in run.method.schema().down if field.peers]
    assert received == {field.name for field in fields}
    assert uploaded == {name for field in fields for name in field.sources}
    shown = facts(run)[FORWARDED]
    assert all(field.description in shown for field in fields)
    assert bool(fields) == (shown != "nothing")


def halved(upload: Message, group: str) -> Message:
    """Return an upload with other values in one group."""
    tensors = {n: t * 0.5 if t.is_floating_point() else t for n, t in upload[group].items()}
    return replace(upload, groups={**upload.groups, group: tensors})


def by_field(message: Message) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for peer, group, name, tensor in message.tensors():
        tensors[f"{peer}/{group}/{name}"] = (group, tensor.numpy().tobytes())
    return tensors | {name: (name, json.dumps(v)) for name, v in message.values.items()}


def after(run: RunConfig, group: str, change: bool) -> Mapping[str, dict[str, Any]]:
    """Return two clients' downloads after the first exchange in which the third uploads a group.

    If `change` is true, the tensors of this group are halved.
    """
    local, exchange = joined(run), 0
    names = sorted(local.clients)
    for exchange in range(run.exchanges):
        local.open(local.config.turn(exchange), names)
        uploads = {name: step(local, name, exchange) for name in names}
        is_uploaded = bool(uploads[names[0]].groups.get(group))
        if is_uploaded and change:
            uploads[names[0]] = halved(uploads[names[0]], group)
        close(local, exchange, uploads)
        if is_uploaded:
            break
    local.open(local.config.turn(exchange + 1), names)
    return {name: by_field(down(local, name)) for name in names[1:]}


@pytest.mark.parametrize("method", each_method(frozenset({"fedamole", "fedmkt"})))
def test_fields_depend_only_on_the_uploads_that_they_name(method, values, teachers) -> None:
    run = run_with_large_means(method, values, teachers)
    schema = run.method.schema()
    for group in {field.name for field in schema.up if field.dtype != "json"}:
        before, changed = after(run, group, False), after(run, group, True)
        names = set()
        for client, fields in changed.items():
            names |= {v[0] for key, v in fields.items() if before[client].get(key) != v}
        declared = {field.name for field in schema.down if group in field.sources}
        assert names <= declared, group


@pytest.mark.parametrize("name", available())
def test_every_field_that_others_depend_on_is_named(name, config) -> None:
    run = config(method=METHODS[name])
    schema, shown = run.method.schema(), facts(run)
    used = {source for field in schema.down for source in field.sources}
    partly = {source for field in schema.down if field.peers for source in field.sources}
    for field in schema.up:
        description = field.description.partition(":")[0]
        places = {key for key in (AVERAGED, COMPUTED) if description in shown.get(key, "")}
        if field.name in partly and field.name not in schema.averaged:
            assert not places  # named as passed on
        else:
            assert len(places) == (field.name in used)


def test_transforms_say_what_they_pass_on(config) -> None:
    load_plugin(TRANSFORMS / "masked_sum.py")
    run = config(method="fedavg", aggregation={"transforms": ["masked_sum"]})
    assert facts(run)[FORWARDED] == "every exchange: public keys, from which masks are derived"
    assert facts(run)[SEEN] == "only results for all clients together (masked_sum)"
    assert facts(config(method="fedavg"))[SEEN] == "each client's values"


def test_the_limit_on_means_is_shown(config) -> None:
    least = [config(method="fedavg", aggregation={"least_others": n}) for n in (1, 2)]
    assert "least 2" in facts(least[1])[LIMIT]
    methods = (config(method=name) for name in ("flexlora", "fedamole", "fedlease"))
    for run in (least[0], *methods):
        assert "another client can compute what" in facts(run)[LIMIT]
    assert not {AVERAGED, LIMIT} & facts(config(method="local")).keys()


def test_noise_is_named_with_what_it_is_added_to(config) -> None:
    load_plugin(TRANSFORMS / "gaussian.py")
    noise = {"transforms": ["clipped_gaussian"], "largest_change": None}
    private = {"name": "fedamole", "embeddings": {"privacy": {"epsilon": 8}}}
    end = "(epsilon 8 and delta 1e-05 for the whole run); no noise is added to anything else"
    updates = f"noise is added to updates from all of this client's text {end}"
    embeddings = f"noise is added to mean embeddings of this client's samples {end}"
    weights = "such as weights that depend on this client's validation samples"
    bare = "no noise is added to anything"
    for method, aggregation, text in (
        *(
            (method, {}, bare)
            for method in ("auto", "cobo", "pcl-2", "fedamole", "fedavg", "local")
        ),
        ("fedavg", noise, updates),
        (private, {}, embeddings),
        ("auto", noise, f"{updates}, {weights}"),
    ):
        assert facts(config(method=method, aggregation=aggregation))[PRIVACY] == text


def test_several_budgets_are_also_shown_together() -> None:
    text = module._noise([Budget(1.0, 1e-5, "a"), Budget(math.inf, 1, "b"), Budget(1.0, 1e-5, "c")])
    assert "a (epsilon 1 and" in text
    assert "c (epsilon 1 and" in text
    # Two equal Gaussian mechanisms are one with the noise divided by the square root of 2.
    total = epsilon(noise_for(1.0, 1, 1e-5) / math.sqrt(2), 1, 1e-5)
    assert f"), epsilon {total:.3g} and delta 1e-05 for the whole run together; no" in text
    assert text.endswith("anything else, such as b")


def alone(method: Any) -> RunConfig:
    """Return a run of one client."""
    return parse({"method": method, "clients": [{"name": "a", "path": "-"}]})


def test_the_page_lists_what_is_passed_on_by_each_method() -> None:
    text = PAGE.read_text(encoding="utf-8")
    row = re.compile(r"^\| ((?:`[\w-]+`(?:, )?)+) \| (.*) \|$", re.MULTILINE)
    rows = row.findall(text.split(HEADING)[1])
    listed = {name: line for names, line in rows for name in re.findall(r"`([\w-]+)`", names)}
    passed_on = {name: facts(alone(name))[FORWARDED] for name in available()}
    assert listed == {name: line for name, line in passed_on.items() if line != "nothing"}


def test_pairs_that_trials_compare_are_named_without_attention() -> None:
    shown = facts(alone({"name": "auto", "attention": None}))[FORWARDED]
    assert "LoRA pairs of the first generalist" in shown
    assert "attention" not in shown


def test_general_samples_are_named(config) -> None:
    assert GENERAL not in facts(config())
    for replay, words in (
        (True, "Coterie's list of requests and texts, with the base's predictions"),
        ({"text": "sampled"}, "texts by the base, with"),
        ({"text": [{"request": "Why?"}]}, "the requests and texts in training.replay.text, with"),
    ):
        assert words in facts(config(training={"replay": replay}))[GENERAL]
