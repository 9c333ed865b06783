"""Messages survive their bytes; nothing else is taken for one, and nothing undeclared passes."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.exchange import Field, Message, MessageError, Schema, State, check_shapes

NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.integers(0, 10**6),
    st.dictionaries(NAMES, st.lists(st.integers(0, 3), max_size=3), max_size=3),
    st.dictionaries(st.text(), VALUES, max_size=3),
)
def test_a_message_survives_its_bytes(round, shapes, values) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    back = Message.decode(Message(round, tensors, values).encode())
    assert back.round == round
    assert back.values == values
    assert back.tensors.keys() == tensors.keys()
    assert all(torch.equal(back.tensors[name], tensors[name]) for name in tensors)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data) -> None:
    with pytest.raises(MessageError):
        Message.decode(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_a_message_or_is_refused(place, byte) -> None:
    data = bytearray(Message(3, {"a/b": torch.arange(4.0)}, {"n": 1}).encode())
    data[place % len(data)] = byte
    with contextlib.suppress(MessageError):
        Message.decode(bytes(data))


def test_every_dtype_keeps_its_bits() -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        tensor = torch.arange(5).to(dtype)
        back = State.decode(State({"x": tensor}).encode()).tensors["x"]
        assert back.dtype == dtype
        assert torch.equal(back, tensor)


def test_what_is_not_declared_may_not_travel() -> None:
    schema = Schema(up=(Field("generalist.*", "experts"), Field("size", "a number", "json")))
    good = Message(0, {"generalist.0/x": torch.ones(2)}, {"size": 3})
    assert schema.receive("up", schema.send("up", good)).values == {"size": 3}
    for tensors, values, why in (
        ({"specialist.0/x": torch.ones(2)}, {}, "may not travel"),
        ({"generalist.0/x": torch.ones(2).half()}, {}, "may not travel"),
        ({"generalist.0/x": torch.tensor([1.0, float("inf")])}, {}, "not finite"),
        ({}, {"loss": 1.0}, "may not travel"),
        ({}, {"generalist.0": [1]}, "may not travel"),
    ):
        with pytest.raises(MessageError, match=why):
            schema.send("up", Message(0, tensors, values))
        with pytest.raises(MessageError, match=why):
            schema.receive("up", Message(0, tensors, values).encode())
    with pytest.raises(MessageError, match="may not travel"):
        schema.send("down", good)


def test_shapes_are_compared_both_ways() -> None:
    message = Message(0, {"a": torch.ones(2, 3)})
    check_shapes(message, {"a": (2, 3)})
    for expected, why in (({}, "not expected"), ({"a": (3, 2)}, "shape")):
        with pytest.raises(MessageError, match=why):
            check_shapes(message, expected)
    with pytest.raises(MessageError, match="missing"):
        check_shapes(message, {"a": (2, 3), "b": (1,)})
