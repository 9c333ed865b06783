"""The mean over clients against its definition, and what clients and the server agree on for it."""

import gc
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from both_ends import exchange_of
from hypothesis import given
from hypothesis import strategies as st
from tensors import mean_of
from torch import Tensor

from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.mean import means_of, weighted_mean
from coterie.exchanges.spec import AggregationSpec
from coterie.exchanges.weights import with_tokens
from coterie.messages import Field, Groups, Message, MessageError, Schema, State
from coterie.methods.sides import Server
from coterie.methods.value import Value
from coterie.runs.store import Stored
from coterie.transforms.context import Rows
from coterie.transforms.contract import Contribution, Reduction, Transform

SCHEMA = Schema(
    hello=(Field("shapes", "shapes", "json"),),
    up=(
        Field("adapter", "pairs", reduce="mean"),
        Field("router", "weights", reduce="mean"),
        Field("update", "a pair"),
        Field("note", "a value", "json"),
    ),
    down=(Field("adapter", "pairs"),),
)
SHAPES = {"adapter": {"A": (2, 3), "B": (4, 2)}, "router": {"w": (3,)}}


def aggregation(
    weights: Any = "uniform", schema: Schema = SCHEMA, *listed: Transform, least_others: int = 1
) -> Exchange:
    rules = AggregationSpec(weights=weights, least_others=least_others)
    return exchange_of(schema, *listed, rules=rules)


def put(exchange: Exchange, **uploads: Message) -> None:
    """Let uploads of clients arrive that have trained from nothing."""
    for name, message in uploads.items():
        exchange.put(name, message, lambda *_: {})
    exchange.settle()


def drawn(shapes: Any, chance: torch.Generator) -> dict[str, dict[str, Tensor]]:
    return {
        group: {name: torch.randn(shape, generator=chance) for name, shape in named.items()}
        for group, named in shapes.items()
    }


def upload(seed: int = 0, **values: Any) -> Message:
    groups = drawn(SHAPES | {"update": {"u": (5,)}}, torch.Generator().manual_seed(seed))
    return Message(4, groups, {"note": "hello"} | values)


def naive(contributions: list[Contribution]) -> dict[tuple[str, str], Tensor]:
    """Return the weighted mean over the clients that have a tensor, by group and name."""
    tensors = [{"/".join(k): t for k, t in flat(each.groups).items()} for each in contributions]
    means = mean_of(tensors, [each.weight for each in contributions])
    return {(name[0], name[2:]): mean for name, mean in means.items()}


def flat(groups: Groups) -> dict[tuple[str, str], Tensor]:
    return {(group, name): t for group, tensors in groups.items() for name, t in tensors.items()}


HELD = st.dictionaries(
    st.sampled_from("gh"), st.dictionaries(st.sampled_from("xyz"), st.just((2, 3)), max_size=3)
)


@given(st.lists(st.tuples(HELD, st.floats(1e-3, 1e6)), max_size=6), st.integers(0, 99))
def test_each_tensor_is_averaged_over_those_who_hold_it(clients, seed) -> None:
    chance = torch.Generator().manual_seed(seed)
    contributions = [
        Contribution(f"client {i}", drawn(held, chance), weight)
        for i, (held, weight) in enumerate(clients)
    ]
    before = [{key: t.clone() for key, t in flat(c.groups).items()} for c in contributions]
    means, expected = flat(weighted_mean(iter(contributions))), naive(contributions)
    assert means.keys() == expected.keys()
    for key, mean in means.items():
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean.double(), expected[key], rtol=1e-6, atol=1e-7)
    after = [flat(each.groups) for each in contributions]  # nothing that arrived is changed
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_no_contributions_no_means() -> None:
    assert weighted_mean([]) == {}
    exchange = aggregation()
    assert exchange.mean("adapter") == exchange.holders("adapter") == exchange.each("note") == {}


def test_sums_are_in_float64() -> None:
    # In float32, 1e8 + 1 is 1e8.
    values = [1e8, 1.0, -1e8, 1.0]
    groups = ({"g": {"x": torch.tensor([value])}} for value in values)
    assert weighted_mean(Contribution("c", each) for each in groups)["g"]["x"].item() == 0.5
    half = {"g": {"x": torch.tensor([1.0, 3.0]).bfloat16()}}
    mean = weighted_mean([Contribution("a", half), Contribution("b", half, 2.0)])["g"]["x"]
    assert (mean.dtype, mean.tolist()) == (torch.float32, [1.0, 3.0])


def test_the_order_is_the_order_given() -> None:
    # Another order of additions would have other rounding errors.
    values, weights = torch.randn(9, 50).mul(1e9).double(), torch.rand(9).tolist()
    for order in (range(9), range(8, -1, -1)):
        total, weight = values[order[0]] * weights[order[0]], weights[order[0]]
        for i in order[1:]:
            total, weight = total + weights[i] * values[i], weight + weights[i]
        stream = (Contribution(str(i), {"g": {"x": values[i]}}, weights[i]) for i in order)
        assert torch.equal(weighted_mean(stream)["g"]["x"], (total / weight).float())


@pytest.mark.parametrize("form", ["mean", "rows", "each"])
def test_uploads_are_read_one_at_a_time_and_none_is_kept(form, monkeypatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    schema = Schema(up=(Field("adapter", "pairs", reduce=form),))
    exchange, names = exchange_of(schema), [str(i) for i in range(20)]
    for i, name in enumerate(names):
        tensor = torch.full((3,), float(i))
        exchange.put(name, Message(0, {"adapter": {"x": tensor}}), lambda *_: {})
    load = Stored.load

    def watched(stored: Stored) -> State:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        state = load(stored)
        alive.append(weakref.ref(state["adapter"]["x"]))
        return state

    monkeypatch.setattr(Stored, "load", watched)
    if form == "mean":
        mean = exchange.mean("adapter")["x"]
    elif form == "rows":
        mean = exchange.means("adapter", {"all": dict.fromkeys(names, 1.0)})["all"]["x"]
    else:
        mean = torch.zeros(3)
        for adapter in exchange.each("adapter").values():
            mean += adapter["x"] / 20
            del adapter
    assert mean.tolist() == pytest.approx([9.5] * 3)
    gc.collect()
    assert len(alive) == 20 + (form == "rows")  # the mean is read, too
    assert most <= 1  # the one that the loop over them still names
    assert not any(ref() is not None for ref in alive[:20])


def test_an_upload_is_divided_between_the_mean_and_the_method() -> None:
    exchange, message = aggregation(), upload()
    put(exchange, ada=message)
    for group in ("adapter", "router"):
        mean = exchange.mean(group)
        assert all(torch.equal(t, mean[n]) for n, t in message[group].items())
    assert torch.equal(exchange.each("update")["ada"]["u"], message["update"]["u"])
    assert exchange.each("note") == {"ada": "hello"}
    assert exchange.transforms.pipeline.schema == SCHEMA


def test_a_group_of_both_ways_goes_to_both() -> None:
    schema = Schema(up=(Field("adapter", "pairs", reduce="mean"), Field("adapter", "pairs")))
    exchange = aggregation("uniform", schema)
    put(exchange, ada=upload().only({"adapter"}))
    assert exchange.mean("adapter").keys() == exchange.each("adapter")["ada"].keys() == {"A", "B"}


@pytest.mark.parametrize(
    ("form", "name", "declared"),
    [
        ("mean", "adapters", "mean"),
        ("mean", "update", "mean"),
        ("means", "adapter", "rows"),
        ("each", "router", "each"),
        ("each", "notes", "each"),
    ],
)
def test_a_field_that_the_schema_does_not_declare_so_is_refused(form, name, declared) -> None:
    exchange, rows = aggregation(), [{}] if form == "means" else []
    with pytest.raises(CoterieError, match=f"'{name}' .* with reduce='{declared}'"):
        getattr(exchange, form)(name, *rows)


def test_a_mean_tells_how_many_held_each_tensor() -> None:
    exchange = aggregation("tokens")
    some, both = {"adapter": {"A": torch.ones(2)}}, {"A": torch.zeros(2), "B": torch.ones(1)}
    all_of_it = {"adapter": both, "router": {"w": torch.ones(1)}}
    uploads: dict[str, tuple[Groups, int]] = {"a": (some, 3), "b": (all_of_it, 1), "c": ({}, 1)}
    for name, (_, tokens) in uploads.items():
        exchange.join(name, with_tokens(Message(), tokens))
    put(exchange, **{name: Message(0, g, {"tokens": t}) for name, (g, t) in uploads.items()})
    assert exchange.mean("adapter")["A"].tolist() == [0.75, 0.75]
    assert {*exchange.mean("adapter")} == {"A", "B"}
    assert exchange.holders("adapter") == {"A": 2, "B": 1}
    assert exchange.holders("router") == {"w": 1}


class Largest(Reduction):
    name: ClassVar[str] = "largest"
    summary: ClassVar[str] = "the largest value of each number"

    def reduce(self, contributions: Any, clients: Any, memory: Any) -> Groups:
        tensors = [c.groups["adapter"]["x"] for c in contributions]
        return {"adapter": {"x": torch.stack(tensors).amax(0)}}


def means_in_memory(
    contributions: Sequence[Contribution], rows: Rows, least_others: int = 1
) -> dict[str, Groups]:
    def of(names: Collection[str]) -> Iterator[Contribution]:
        return (c for c in contributions if c.client in names)

    clients = {c.client for c in contributions}
    pairs = means_of(of, clients, rows, least_others)
    return {name: groups for names, groups in pairs for name in names}


@given(st.data())
def test_means_of_rows_are_weighted_twice(data) -> None:
    clients = [*"abcd"]
    weight = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    rows = {
        c: {k: data.draw(weight) for k in data.draw(st.sets(st.sampled_from(clients)))}
        for c in clients
    }
    some = [k for k in clients if data.draw(st.booleans())]
    chance = torch.Generator().manual_seed(0)
    shapes = {k: data.draw(st.sampled_from([{"x": 3}, {"x": 3, "y": 2}])) for k in some}
    parts = {k: drawn({"g": each}, chance) for k, each in shapes.items()}
    sizes = {k: float(data.draw(st.integers(1, 50))) for k in some}
    least = data.draw(st.integers(1, 3))
    means = means_in_memory([Contribution(k, parts[k], sizes[k]) for k in some], rows, least)

    def may_receive(client: str, senders: set[str]) -> bool:
        others = len(senders - {client}) if client in some else len(senders) - 1
        return least == 1 or others >= least or senders == {client}

    for c, row in rows.items():
        used = [Contribution(k, parts[k], row[k] * sizes[k]) for k in some if row.get(k)]
        holders = {n: {u.client for u in used if n in u.groups["g"]} for n in "xy"}
        permitted = {key: t.float() for key, t in naive(used).items()}
        expected = {k: t for k, t in permitted.items() if may_receive(c, holders[k[1]])}
        assert (c in means) == bool(used)
        torch.testing.assert_close(flat(means.get(c, {})), expected)


def test_a_mean_of_too_few_clients_is_not_computed() -> None:
    # Each of two clients could subtract its own tensor from their mean.
    rows = torch.randn(3, 2)
    for least, names in ((1, {"x", "y"}), (2, {"x"}), (3, set())):
        exchange = aggregation(least_others=least)
        sent = [{"x": row, "y": row.clone()} if i else {"x": row} for i, row in enumerate(rows)]
        put(exchange, **{f"c{i}": Message(0, {"adapter": each}) for i, each in enumerate(sent)})
        mean = exchange.mean("adapter")
        assert mean.keys() == exchange.holders("adapter").keys() == names
        assert not names or torch.allclose(mean["x"], rows.mean(0))


def test_a_reduction_makes_the_mean() -> None:
    rows, exchange = torch.randn(4, 3), aggregation("uniform", SCHEMA, Largest())
    put(exchange, **{f"c{i}": Message(0, {"adapter": {"x": row}}) for i, row in enumerate(rows)})
    assert torch.equal(exchange.mean("adapter")["x"], rows.amax(0))
    assert exchange.holders("adapter") == {"x": 4}


def test_shapes_must_be_those_expected() -> None:
    expected: dict[str, Any] = {}

    class Expecting(Server):
        def expects(self, value: Any, client: str, exchange: Exchange) -> Any:
            return expected

    server, exchange, good = Expecting(), aggregation(), upload()
    expected |= {**SHAPES, "update": {"u": (5,)}}
    server.check(Value(), "ada", good, exchange)
    cases: list[tuple[Groups, str]] = [
        ({**good.groups, "adapter": {"A": torch.ones(2, 3)}}, "'B' is missing from"),
        ({"adapter": good["adapter"]}, "'w' is missing from"),
        ({**good.groups, "update": {}}, "'u' is missing from"),
        ({**good.groups, "router": {"w": torch.ones(3), "v": torch.ones(1)}}, "'v' was not expec"),
        ({**good.groups, "router": {"w": torch.ones(3, 1)}}, r"has shape \(3, 1\), but \(3,\)"),
    ]
    for groups, why in cases:
        with pytest.raises(MessageError, match=why):
            server.check(Value(), "ada", Message(0, groups), exchange)
    expected.clear()
    with pytest.raises(MessageError, match="'A' was not expected"):
        server.check(Value(), "ada", good, exchange)


def test_uniform_weights_send_nothing_more() -> None:
    exchange = aggregation()
    message = upload()
    exchange.join("ada", Message())
    put(exchange, ada=message)
    assert exchange.weight("ada") == 1.0
    assert not exchange.transforms.pipeline.weighted
    with pytest.raises(MessageError, match="'tokens' may not be sent"):
        exchange.transforms.pipeline.schema.send("up", upload(tokens=100))


def test_weights_are_the_training_tokens_that_clients_tell() -> None:
    exchange = aggregation("tokens")
    schema, uploads = exchange.transforms.pipeline.schema, dict[str, Message]()
    for i, (name, tokens) in enumerate([("ada", 300), ("bob", 100)]):
        hello = schema.send("hello", with_tokens(Message(values={"shapes": {}}), tokens))
        exchange.join(name, schema.receive("hello", hello))
        own = with_tokens(upload(i), tokens)
        assert (own.values["tokens"], own.values["note"], own.exchange) == (tokens, "hello", 4)
        uploads[name] = schema.receive("up", schema.send("up", own))
    put(exchange, **uploads)
    assert [exchange.weight(name) for name in exchange.counted] == [300.0, 100.0]
    for group in ("adapter", "router"):
        for name, tensor in exchange.mean(group).items():
            first, second = (upload(i)[group][name] for i in range(2))
            torch.testing.assert_close(tensor, 0.75 * first + 0.25 * second)
    assert schema.down == SCHEMA.down
    for way in ("hello", "up"):
        names = [field.name for field in getattr(schema, way)]
        assert names == [*(field.name for field in getattr(SCHEMA, way)), "tokens"]


def test_weights_are_bounded_by_the_hello_and_are_whole_numbers() -> None:
    exchange = aggregation("tokens")
    for wrong in (None, 0, -3, 1.5, True, "100", [100]):
        with pytest.raises(MessageError, match="'ada' did not send its number of training tokens"):
            exchange.join("ada", Message(values={} if wrong is None else {"tokens": wrong}))
    exchange.join("ada", with_tokens(Message(), 1000))
    why = "'ada' claims 1,001 training tokens in its upload, but declared 1,000"
    with pytest.raises(MessageError, match=why):
        put(exchange, ada=upload(tokens=1001))
    put(exchange, ada=upload(tokens=999))
    assert exchange.weight("ada") == 999.0
    with pytest.raises(MessageError, match="'ada' did not send its number of training tokens"):
        put(exchange, ada=upload())
    exchange.join("ada", with_tokens(Message(), 2000))  # again, with more text
    put(exchange, ada=upload(tokens=1001))
    assert exchange.weight("ada") == 1001.0


def test_weights_are_told_once_even_if_the_method_tells_them_too() -> None:
    tokens = Field("tokens", "tokens", "json")
    exchange = aggregation("tokens", Schema((tokens,), SCHEMA.up))
    assert [field.name for field in exchange.transforms.pipeline.schema.hello] == ["tokens"]
    nothing = aggregation("tokens", Schema(up=(Field("update", "a pair"),)))
    assert not nothing.transforms.pipeline.weighted  # there is no mean to weigh
    assert nothing.transforms.pipeline.schema == Schema(up=(Field("update", "a pair"),))
