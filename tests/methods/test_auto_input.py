"""Auto: federations of any size, little text, and wrong uploads, downloads and run files."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from auto_runs import NAMES, auto, chosen, forged_round, started
from tensors import equal
from turns import nth

from coterie.errors import CoterieError
from coterie.messages import Message, MessageError
from coterie.methods.tensors import copied
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, joined, one_round, take


@pytest.fixture(scope="module")
def make(config):
    """A run of `auto` whose clients have joined."""

    def make(names=NAMES, validation: int = 80, **method: Any) -> Any:
        texts = dict(zip(names, names, strict=True))
        return started(config, texts, data=limits(validation), method=auto(**method))

    return make


@pytest.fixture(scope="module")
def pair(make):
    """A run of two clients in its first exchange."""
    local = make(["poet", "whaler"], 17)
    local.open(nth(0), ["poet"])
    return local


@pytest.fixture(scope="module")
def before_trial(make):
    """A client before its first trial, and its download."""
    local = make(validation=34)
    one_round(local, 0)
    return local.clients["poet"], down(local, "poet")


def played(local: Any, rounds: int = 4) -> dict[str, Message]:
    uploads = {}
    for r in range(rounds):
        uploads = one_round(local, r)
    take(local)
    return uploads


def test_a_single_client_trains_alone(make) -> None:
    local = make(["poet"])
    uploads = played(local)
    poet = local.clients["poet"]
    assert poet.row == {}  # no trial
    assert not local.value.tried
    sent = uploads["poet"]["adapter"]
    assert equal(down(local, "poet")["adapter"], sent)
    assert equal({n: poet.shared[n] for n in sent}, sent)


@pytest.mark.slow
@pytest.mark.parametrize(("trials", "pairs"), [("parameters", 16), ("gradients", 0)])
def test_a_hundred_clients_have_trials(trials, pairs, config) -> None:
    texts = {f"c{i}": NAMES[i % 3] for i in range(100)}
    local = started(config, texts, method=auto(samples=4, trials=trials))
    one_round(local, 0)
    assert {len(down(local, name).peers) for name in ("c0", "c50", "c99")} == {pairs}
    one_round(local, 1)
    assert local.value.rows.keys() == texts.keys()
    for row in local.value.rows.values():
        assert sum(row.values()) == pytest.approx(1)
        assert row.keys() <= texts.keys()


@pytest.mark.parametrize("tokens", [17, 33, 34])
def test_few_validation_samples_are_enough(tokens, make) -> None:
    # A single sample gives no evidence: all clients share one mean, and no client is alone.
    local = make(validation=tokens)
    assert {len(client.judging.ids) for client in local.clients.values()} == {1}
    played(local)
    for client in local.clients.values():
        assert client.row == pytest.approx(dict.fromkeys(NAMES, 1 / 3))


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"attention": None}, "generalist.0/"),
        ({"attention": None, "mlp": {"generalists": 1}}, "generalist.0/"),
        ({"mlp": {"generalists": 0}}, "dense/"),
        ({"mlp": {"generalists": {"poet": 1, "others": 2}}}, "dense/"),
    ],
)
def test_clients_judge_by_what_all_of_them_hold(settings, start, make) -> None:
    local = make(**settings)
    one_round(local, 0)
    peers = down(local, "poet").peers
    assert peers
    names = {n for groups in peers.values() for n in groups["adapter"]}
    judged = {n for n in local.clients["poet"].shared if n.startswith(start)}
    assert names == judged != set()
    for r in range(1, 4):
        one_round(local, r)
    take(local)
    assert local.value.tried == dict.fromkeys(NAMES, 3)


def limits(validation: int) -> dict[str, Any]:
    return {"window": 16, "limits": {"train": 2000, "validation": validation, "test": 400}}


@pytest.mark.parametrize(
    ("method", "changes", "match"),
    [
        ({"mlp": {"rank": {"poet": 3, "others": 8}}}, {}, "needs the same rank"),
        ({"attention": None, "mlp": {"generalists": 0}}, {}, "set method.mlp or"),
        ({"samples": 1}, {}, "method.samples"),
        ({"peers": 0}, {}, "method.peers"),
        ({"set_aside": 1.0}, {}, "method.set_aside"),
        ({"trust": -1}, {}, "method.trust"),
        ({"every": 0}, {}, "method.every"),
        ({}, {"bases": {"poet": "OTHER"}}, r"needs the run's base .* remove `bases`"),
        ({}, {"aggregation": {"weights": "tokens"}}, r"set aggregation\.weights to uniform"),
        ({}, {"data": limits(16)}, r"limit of 16 validation tokens .* at least 17\.$"),
        ({"peers": 1}, {"aggregation": {"least_others": 2}}, r"others \(2\) exceeds method\.peers"),
        ({}, {"aggregation": {"least_others": 3}}, "is 3, but the run has only 3 clients"),
    ],
)
def test_runs_that_cannot_work_are_refused(method, changes, match, config, other) -> None:
    changes = {k: {"poet": other} if k == "bases" else v for k, v in changes.items()}
    with pytest.raises(CoterieError, match=match):
        joined(config(method=auto(**method), **changes))


ROWS: list[Any] = [
    *({"whaler": weight} for weight in (-0.1, 1.5, 1.7e308, 2**62, True, "1", None, [1.0])),
    {"nobody": -1.0},
    dict.fromkeys(NAMES, 1.7e308),  # the sum of two weights would be infinite
    [1.0],
    None,
]
WRONG: list[Any] = [
    *({"row": row} for row in ROWS),
    *({"tokens": tokens} for tokens in (0, -1, 1.5, "1", None, True)),
    {"trial": True},
]
MISSING: list[Any] = [{}, {"choice": None}, {"choice": {"row": {}}}]


@pytest.mark.parametrize("choice", [*WRONG, *MISSING], ids=str)
def test_an_invalid_choice_is_refused(choice, pair) -> None:
    upload = pair.clients["poet"].upload(nth(0))
    pair.server.check(pair.value, "poet", upload, pair.exchange)
    before = pair.value.state()
    wrong = replace(upload, values=choice) if choice in MISSING else chosen(upload, **choice)
    with pytest.raises(MessageError, match="'poet' sent an invalid choice"):
        pair.server.check(pair.value, "poet", Message.decode(wrong.encode()), pair.exchange)
    assert_equal(pair.value.state(), before, "server")


@pytest.mark.parametrize("number", [math.nan, math.inf, 2**63, -(2**63) - 1])
@pytest.mark.parametrize("key", ["row", "tokens"])
def test_numbers_that_are_not_plain_are_never_sent(key, number, pair) -> None:
    value = {"whaler": number} if key == "row" else number
    with pytest.raises(MessageError, match="non-finite numbers or integers beyond 64"):
        pair.schema.send("up", chosen(pair.clients["poet"].upload(nth(0)), **{key: value}))


@pytest.mark.parametrize("row", [{"whaler": 0.0}, {"nobody": 1.0}, {"whaler": 5e-324}], ids=str)
def test_a_row_without_weight_concerns_its_sender_only(row, make) -> None:
    # Unknown names and very small weights are tolerated: the sender receives what it asked for.
    local = make(validation=17)
    forged_round(local, 0)
    forge = {"poet": lambda u: chosen(u, row=row)}
    _, uploads = forged_round(local, 1, forge)
    asked = "whaler" if row.get("whaler") else "poet"
    received = down(local, "poet")["adapter"]
    assert received.keys() == uploads[asked]["adapter"].keys()
    if asked == "poet":
        assert equal(received, uploads["poet"]["adapter"])
    assert all(bool(t.isfinite().all()) for t in received.values())
    row = local.server.rows(local.value, local.exchange)["diarist"]
    assert row == pytest.approx(dict.fromkeys(NAMES, 1 / 3))


PAIR = "dense/transformer.h.0.attn.c_attn.A"
SIZES: list[Any] = ["no sizes", None, [2000], {}, {"diarist": 2000}]
SIZES += [{"diarist": 2000, "whaler": n} for n in (0, -5, 1.5, "2000", None, True)]


def spoilt(download: Message, how: Any) -> Message:
    """Return a trial's download whose sizes or pairs, or whose mean, are wrong."""
    pairs = {peer: dict(groups["adapter"]) for peer, groups in download.peers.items()}
    match how:
        case "missing":
            del pairs["whaler"][PAIR]
        case "shape":
            pairs["whaler"][PAIR] = pairs["whaler"][PAIR][:1]
        case "unknown":
            pairs["whaler"]["dense/x.A"] = torch.zeros(2)
        case "expert":
            pairs["whaler"]["generalist.0/transformer.h.0.mlp.c_fc.A"] = torch.zeros(8, 32)
        case "mean":
            mean = dict(download["adapter"])
            del mean[PAIR]
            return replace(download, groups={"adapter": mean})
        case "no sizes":
            return replace(download, values={})
        case _:
            return replace(download, values={"sizes": how})
    return replace(download, peers={peer: {"adapter": tensors} for peer, tensors in pairs.items()})


@pytest.mark.parametrize("how", [*SIZES, "missing", "shape", "unknown", "expert", "mean"], ids=str)
def test_an_invalid_download_is_refused_without_effect(how, before_trial) -> None:
    poet, download = before_trial
    before, buffers = poet.state(), {g: copied(t) for g, t in poet.buffers.items()}
    with pytest.raises(MessageError):
        poet.receive(spoilt(download, how))
    assert_equal(poet.state(), before, "client")
    assert all(equal(poet.buffers[group], tensors) for group, tensors in buffers.items())
    poet.receive(download)
    assert poet.row
    poet.restore(before)
