"""Messages survive their bytes; nothing else is taken for one, and nothing undeclared passes."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from coterie.messages import Field, Groups, Message, MessageError, Schema, State, check_shapes
from coterie.messages.formats import FORMAT, VERSION, FormatError, version_fields
from coterie.messages.schema import Way

WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)
"""Names of groups, peers and parts; those of tensors are any text."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.text(), VALUES, max_size=3)
NAMES = st.text(max_size=20) | st.sampled_from(["a/b:c", ":/", "/", "__metadata__", "", "é\n\x00"])
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8])
TENSORS = st.dictionaries(NAMES, st.builds(lambda s, d: (9 * torch.rand(s)).to(d), SHAPES, DTYPES))
GROUPS = st.dictionaries(WORDS, TENSORS, max_size=3)
STATES = st.recursive(
    st.builds(State, GROUPS, MAPPINGS),
    lambda inner: st.builds(State, GROUPS, MAPPINGS, st.dictionaries(WORDS, inner, max_size=2)),
    max_leaves=4,
)


def assert_same(groups: Groups, others: Groups) -> None:
    """Check that tensors have equal names, dtypes and bits; groups without tensors do not count."""
    actual, expected = ({(g, n) for g in some for n in some[g]} for some in (groups, others))
    assert actual == expected
    for group, name in actual:
        assert groups[group][name].dtype == others[group][name].dtype
        assert torch.equal(groups[group][name], others[group][name])


@given(st.integers(0, 10**6), GROUPS, MAPPINGS, st.dictionaries(WORDS, GROUPS, max_size=3))
def test_a_message_survives_its_bytes(round, groups, values, peers) -> None:
    back = Message.decode(Message(round, groups, values, peers).encode())
    assert (back.exchange, back.values) == (round, values)
    assert_same(back.groups, groups)
    for peer in peers.keys() | back.peers.keys():
        assert_same(back.peers.get(peer, {}), peers[peer])
    assert all(back.groups.values())  # empty groups vanish
    assert all(peer and all(peer.values()) for peer in back.peers.values())


@given(STATES)
def test_a_state_survives_its_bytes_with_all_its_parts(state) -> None:
    back = dict(State.decode(state.encode()).walk())
    assert back.keys() == dict(state.walk()).keys()
    for path, part in state.walk():
        assert back[path].values == part.values
        assert_same(back[path].groups, part.groups)
        assert all(back[path].groups.values())


def test_groups_peers_and_tensors_are_found_by_their_names() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    message = Message(4, {"a": {"x": x}, "b": {"y": y}}, {"n": 1}, {"bob": {"a": {"x": y}}})
    assert message["a"]["x"] is x
    assert message["nothing"] == {}
    assert message.from_peer("bob")["a"]["x"] is y
    assert message.from_peer("bob").exchange == 4
    entries = [(peer, group, name) for peer, group, name, _ in message.tensors()]
    assert entries == [(None, "a", "x"), (None, "b", "y"), ("bob", "a", "x")]
    kept = message.only({"b", "other"})
    assert (list(kept.groups), kept.values, kept.exchange) == (["b"], {"n": 1}, 4)


def raw(*keys: str, **header: Any) -> bytes:
    """Return bytes with tensors under these keys; header fields that are None are omitted."""
    whole = version_fields() | {"exchange": 0, "values": {}} | header
    text = json.dumps({key: value for key, value in whole.items() if value is not None})
    return save({key: torch.ones(1) for key in keys}, {"coterie": text})


OUTSIDE = ["-a", ".a", "a b", "é", "a\n", "a" * 101, "", "a*"]
"""Invalid names of groups, peers and parts."""


@pytest.mark.parametrize(
    "key",
    [
        *("x", "adapter", ":".join("abcdefghi") + "/x"),
        *(f"{name}{end}" for name in OUTSIDE for end in ("/x", ":adapter/x")),
        *(f"adapter:{name}/x" for name in OUTSIDE),
    ],
)
def test_a_tensor_of_no_group_is_refused(key) -> None:
    for decode in (Message.decode, State.decode):
        with pytest.raises(MessageError, match="a tensor that belongs to no group"):
            decode(raw("adapter/good", key))


def test_peers_have_no_parts_and_states_do() -> None:
    data = raw("alice:training:exp_avg/x", "alice:training/x")
    with pytest.raises(MessageError, match="another client's upload, which contains nested groups"):
        Message.decode(data)
    state = State.decode(data)
    assert list(state.parts["alice"].parts["training"]["exp_avg"]) == ["x"]
    assert list(state.parts["alice"]["training"]) == ["x"]
    longest = raw(f"{'a' * 100}/x")
    assert list(Message.decode(longest).groups) == ["a" * 100]


@pytest.mark.parametrize(
    "values",
    [
        *({name: {}} for name in OUTSIDE if name),
        *({path: {}} for path in ("a:", ":".join("abcdefgh"), ":".join("a" * 20_000))),
        *({"": 3}, {"a": [1]}),
    ],
    ids=range(len(OUTSIDE) + 4),
)
def test_values_of_no_part_are_refused(values) -> None:
    with pytest.raises(MessageError, match="nested state with an invalid path"):
        State.decode(raw(values=values))


OTHER_FORMATS = {
    "the first, which has no number": (raw("generalist.0/x", "x", format=None, coterie=None), 1),
    "the next": (raw(format=FORMAT + 1, coterie="9.8.7"), FORMAT + 1),
    "the first, told": (raw(format=1, coterie="0.1.0"), 1),
    "a word": (raw(format="two", coterie=["0.1"]), "two"),
    "a long one": (raw(format="2" * 10**5, coterie="1" * 10**5), "2" * 20),
}


@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_another_format_is_refused_in_a_sentence(case) -> None:
    data, number = OTHER_FORMATS[case]
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8:end])["__metadata__"]["coterie"])
    wrote = str(header.get("coterie", "another version"))[:20]
    for decode, kind, remedy in (
        (Message.decode, "A message", "Install the same version on both sides."),
        (State.decode, "A state", "Use the version that wrote it."),
    ):
        with pytest.raises(FormatError) as error:
            decode(data)
        assert str(error.value) == (
            f"{kind} has format {number} (written by Coterie {wrote}), but Coterie "
            f"{VERSION} reads format {FORMAT}. {remedy}"
        )


def refuse(schema: Schema, way: Way, message: Message, why: str = "may not be sent") -> None:
    """Check that neither side takes a message."""
    with pytest.raises(MessageError, match=why):
        schema.send(way, message)
    with pytest.raises(MessageError, match=why):
        schema.receive(way, message.encode())


def test_what_is_not_declared_may_not_travel() -> None:
    schema = Schema(up=(Field("generalist", "experts"), Field("size", "a number", "json")))
    good = Message(0, {"generalist": {"x": torch.ones(2)}}, {"size": 3})
    assert schema.receive("up", schema.send("up", good)).values == {"size": 3}
    x: dict[str, Tensor] = {"x": torch.ones(2)}
    cases: list[tuple[Groups, dict[str, Any], str]] = [
        ({"specialist": x}, {}, "may not be sent"),
        ({"generalist.0": x}, {}, "may not be sent"),
        ({"size": x}, {}, "may not be sent"),
        ({"generalist": {"x": torch.ones(2).half()}}, {}, "may not be sent"),
        ({"generalist": {"x": torch.tensor([1.0, float("inf")])}}, {}, "non-finite"),
        ({}, {"loss": 1.0}, "may not be sent"),
        ({}, {"generalist": [1]}, "may not be sent"),
    ]
    for groups, values, why in cases:
        refuse(schema, "up", Message(0, groups, values), why)
    refuse(schema, "down", good)
    refuse(schema, "up", Message(peers={"bob": good.groups}))


def test_a_field_may_say_each_tensor_s_dtype() -> None:
    field = Field("logits", "the best tokens", {"tokens": "int32", "nats": "float32"})
    schema = Schema(up=(field,))
    tokens, nats = torch.arange(3).int(), torch.ones(3)
    schema.send("up", Message(0, {"logits": {"tokens": tokens, "nats": nats}}))
    schema.send("up", Message(0, {"logits": {"nats": nats}}))  # shapes say what is missing
    for wrong in ({"text": nats}, {"tokens": nats}, {"nats": tokens}, {"nats": nats.double()}):
        refuse(schema, "up", Message(0, {"logits": wrong}), "of the group 'logits' may not be sent")
    assert field.allows("tokens", "int32")
    assert not field.allows("tokens", "float32")
    assert not field.allows("text", "float32")


def test_a_field_of_peers_is_of_others_alone() -> None:
    schema = Schema(down=(Field("mine", "the mean"), Field("theirs", "updates", peers=True)))
    x, bob, cyd = ({"x": torch.full((2,), float(n))} for n in range(3))
    good = Message(1, {"mine": x}, peers={"bob": {"theirs": bob}, "cyd": {"theirs": cyd}})
    back = schema.receive("down", schema.send("down", good))
    assert set(back.peers) == {"bob", "cyd"}
    assert torch.equal(back.from_peer("cyd")["theirs"]["x"], cyd["x"])
    for wrong in (Message(1, {"theirs": x}), Message(1, peers={"bob": {"mine": x}})):
        refuse(schema, "down", wrong)
    bad = Message(1, peers={"bob": {"theirs": {"x": torch.tensor([float("nan")])}}})
    refuse(schema, "down", bad, "non-finite")


def test_uploads_are_reduced_as_their_fields_say() -> None:
    fields = [Field(name, "pairs", reduce="mean") for name in ("adapter", "router")]
    fields += [Field("update", "pairs"), Field("tokens", "a number", "json")]
    schema = Schema(up=tuple(fields), down=(Field("other", "no upload", reduce="mean"),))
    assert schema.reduced("mean") == {"adapter", "router"}
    assert schema.reduced("each") == {"update", "tokens"}
    both = Schema(up=(*fields, Field("adapter", "pairs")))
    assert "adapter" in both.reduced("mean") & both.reduced("each")


def test_shapes_are_compared_both_ways() -> None:
    tensors = {"a": torch.ones(2, 3)}
    check_shapes(tensors, {"a": (2, 3)})
    larger = {"a": (2, 3), "b": (1,)}
    for expected, why in (({}, "not expected"), ({"a": (3, 2)}, "shape"), (larger, "missing")):
        with pytest.raises(MessageError, match=why):
            check_shapes(tensors, expected)


def test_tensors_come_in_the_order_of_their_names() -> None:
    groups = {group: {name: torch.ones(1) for name in "zyxwvutsrq"} for group in "edcab"}
    got = Message.decode(Message(0, groups).encode())
    assert list(got.groups) == sorted(groups)
    assert all(list(tensors) == sorted("zyxwvutsrq") for tensors in got.groups.values())


def test_a_tensor_may_occur_twice() -> None:
    tensor = torch.rand(2, 3)  # safetensors refuses tensors that share memory
    twice, separate = (
        Message(0, {"a": {"x": tensor, "y": y}}, peers={"eve": {"a": {"x": x}}})
        for x, y in ((tensor, tensor.detach()), (tensor.clone(), tensor.clone()))
    )
    assert twice.encode() == separate.encode()
    state = State({"a": {"x": tensor}}, parts={"eve": State({"a": {"x": tensor}})})
    assert torch.equal(State.decode(state.encode()).parts["eve"]["a"]["x"], tensor)
