"""Whatever bytes arrive: a message, or MessageError, and never much more memory than they take."""

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hostile import HOSTILE, NAMES, replace_one
from torch import Tensor

from coterie.messages import Field, Message, MessageError, Schema, State
from coterie.messages.formats import FORMAT, FormatError
from coterie.messages.message import LARGEST_HEADER
from coterie.testing.loop import flat

WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
WIDTHS |= {"I16": 2, "U16": 2, "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
WIDTHS |= {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
DTYPES = [*WIDTHS, "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4", "F128", "f32", "__class__"]
TORCH = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Every(str):
    """A name that equals every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


SCHEMA = Schema(
    up=tuple(
        Field(Every(), "anything", dtype, peers=peers)
        for dtype in (*sorted(TORCH), "json")
        for peers in (False, True)
    )
)

KEYS = ["g/x", "g/", "h/x", "g//x", "bob:g/x", "bob:g/é:", "ann:g/x", *NAMES]


def originals() -> list[bytes]:
    """Return valid messages and states of several kinds."""
    nested = {"a": [1, 2.5, None, {"b": ["c", True]}], "é": {"": []}, "n": -(2**63)}
    floats = [torch.randn(3, 2).to(getattr(torch, d)) for d in ("float32", "bfloat16", "float64")]
    whole = [torch.arange(5).to(getattr(torch, d)) for d in ("uint8", "int64", "bool", "int8")]
    odd = [torch.zeros(0, 4), torch.tensor(1.5), torch.zeros(2, 0, 3).bfloat16(), torch.ones(1)]
    small = [torch.ones(4).to(torch.float8_e4m3fn), torch.ones(4).to(torch.float8_e5m2)]
    every = [*floats, *whole, *odd, *small]
    several = {
        "adapter": {f"layers.{i}/x": t for i, t in enumerate(every)},
        "b": {"": floats[0] + 1},
    }
    # Nothing can be saved twice, so whatever is here again is a copy.
    copies = [{g: {n: t.clone() for n, t in ts.items()} for g, ts in several.items()} for _ in "12"]
    odd_name = {"g": {"é:/": torch.zeros(2, 2)}}
    inner = State({"exp_avg": copies[0]["adapter"]}, nested, {"joint": State(copies[1], {"n": 1})})
    return [
        Message().encode(),
        Message(7, {"g": {"x": torch.arange(3.0)}}, {"tokens": 12}).encode(),
        Message(2**31, {}, nested).encode(),
        Message(3, several, nested).encode(),
        Message(3, odd_name, {}, {"bob": several, "ann": copies[0]}).encode(),
        State(several, nested).encode(),
        State({}, {"ranks": [1, 2]}).encode(),
        State(several, {}, {"training": inner, "empty": State()}).encode(),
    ]


def pack(header: str, data: bytes) -> bytes:
    raw = header.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + data


def unpack(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def edit_header(data: bytes, rng: random.Random) -> bytes:
    header, rest = unpack(data)
    return pack(replace_one(header, rng), rest)


def edit_values(data: bytes, rng: random.Random) -> bytes:
    header, rest = unpack(data)
    inner = json.loads(header["__metadata__"]["coterie"])
    header["__metadata__"]["coterie"] = replace_one(inner, rng)
    return pack(json.dumps(header), rest)


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice([data[:start], data[start:], data[:start] + data[end:], data + data[start:]])


def splice(data: bytes, rng: random.Random) -> bytes:
    other = rng.choice(ORIGINALS)
    head, tail = rng.randrange(len(data)), rng.randrange(len(other))
    header, _ = unpack(other)
    return rng.choice([data[:head] + other[tail:], pack(json.dumps(header), unpack(data)[1])])


def resize(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 2, len(data), 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
    return size.to_bytes(8, "little") + data[8:]


def build(_data: bytes, rng: random.Random) -> bytes:
    """Build a header from nothing, whose entries mostly fit their data."""
    end, entries = 0, []
    for _ in range(rng.randrange(4)):
        dtype = rng.choice(DTYPES)
        shape = [rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.choice([0, 1, 2, 3, 66]))]
        start, length = end, WIDTHS.get(dtype, 1)
        for size in shape:
            length *= size
        end = start + min(length, 2**12)
        parts = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        if rng.random() < 0.2:
            parts[rng.choice(list(parts))] = "@"
        text = json.dumps(parts).replace('"@"', rng.choice(HOSTILE))
        entries.append(f"{json.dumps(rng.choice(KEYS))}:{text}")
    values = json.dumps({"format": FORMAT, "exchange": 1, "values": {rng.choice(NAMES): "@"}})
    inner = values.replace('"@"', rng.choice(HOSTILE)) if rng.random() < 0.5 else values
    entries.insert(0, f'"__metadata__":{{"coterie":{json.dumps(inner)}}}')
    rng.shuffle(entries)
    return pack("{" + ",".join(entries) + "}", rng.randbytes(end))


def noise(_data: bytes, rng: random.Random) -> bytes:
    body = rng.randbytes(rng.randrange(300))
    return rng.choice([body, pack(body.decode("latin-1"), b""), pack(rng.choice(HOSTILE), body)])


Mutation = Callable[[bytes, random.Random], bytes]
MUTATIONS: list[Mutation] = [edit_header, edit_values, flip, cut, splice, resize, build, noise]
torch.manual_seed(0)
ORIGINALS = originals()


def inputs(seed: int, count: int) -> Iterator[tuple[Mutation, bytes]]:
    rng = random.Random(seed)
    for number in range(count):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        data = mutate(rng.choice(ORIGINALS), rng)
        yield mutate, flip(data, rng) if data and rng.random() < 0.1 else data


def decoded(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """Decode bytes; return None if they are refused with the proper error."""
    try:
        return decode(data)
    except (MessageError, FormatError):
        return None
    except BaseException as error:  # a panic in Rust is no Exception
        raise AssertionError(f"{error!r} on {data[:3000]!r}") from error


def contents(value: Message | State) -> dict[tuple[Any, str, str], Tensor]:
    """Return the tensors of a message or state; check that values are mappings."""
    if isinstance(value, Message):
        return {(peer, group, name): t for peer, group, name, t in value.tensors()}
    states = dict(value.walk())
    assert all(isinstance(state.values, dict) for state in states.values())
    return {(path, *key): t for path, state in states.items() for key, t in flat(state).items()}


def check_inputs(seed: int, count: int) -> None:
    taken = Counter[str]()
    for mutate, data in inputs(seed, count):
        for decode in (Message.decode, State.decode):
            value = decoded(decode, data)
            if value is not None:
                assert sum(tensor.nbytes for tensor in contents(value).values()) <= len(data)
        message = decoded(lambda data: SCHEMA.receive("up", data), data)
        if message is not None:
            taken[mutate.__name__] += 1
            again = SCHEMA.receive("up", SCHEMA.send("up", message))
            assert (again.exchange, again.values) == (message.exchange, message.values), data
            assert contents(again).keys() == contents(message).keys(), data
    deep = {mutate.__name__ for mutate in MUTATIONS} - {"resize", "noise"}
    assert deep <= taken.keys()  # mutants that are all refused at the door would test nothing
    assert taken.total() < count / 2


def test_thousands_of_inputs_are_a_message_or_are_refused() -> None:
    check_inputs(seed=0, count=10_000)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_more_inputs_are_a_message_or_are_refused(seed: int) -> None:
    check_inputs(seed, count=100_000)


def entry(dtype: str, shape: str, size: int) -> str:
    return f'"g/x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{size}]}}'


def message(*entries: str, values: str = "{}", round: str = "1") -> bytes:
    inner = json.dumps(f'{{"format":{FORMAT},"exchange":{round},"values":{values}}}')
    size = 4 if entries else 0
    header = f'"__metadata__":{{"coterie":{inner}}}'
    return pack("{" + ",".join([header, *entries]) + "}", bytes(size))


REFUSED = {
    "strides past 64 bits": message(entry("F32", f"[0,{2**33},{2**33}]", 0))[:-4],
    "more dimensions than torch computes with": message(entry("F32", "[" + "1," * 64 + "1]", 4)),
    "a float of a kind that torch lacks": message(entry("F8_E8M0", "[4]", 4)),
    "a float of four bits": message(entry("F4", "[8]", 4)),
    "a round of 400 digits": message(round="9" * 400),
    "a round that is a truth value": message(round="true"),
    "not a number": message(values='{"a":NaN}'),
    "infinity": message(values='{"a":[-Infinity]}'),
    "a number past float64": message(values='{"a":{"b":1e999}}'),
    "more digits than Python reads": message(values='{"a":' + "9" * 5000 + "}"),
    "values nested past recursion": message(values='{"a":' + "[" * 9000 + "]" * 9000 + "}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_torch_or_json_would_choke_on_is_refused(kind: str) -> None:
    with pytest.raises(MessageError):
        Message.decode(REFUSED[kind])


def test_a_schema_refuses_values_that_would_overflow_later() -> None:
    for values in ('{"a":' + "[" * 500 + "]" * 500 + "}", '{"a":' + "9" * 400 + "}"):
        with pytest.raises(MessageError, match="64 bits"):
            SCHEMA.receive("up", message(values=values))
    assert SCHEMA.receive("up", message(values=f'{{"a":{2**63 - 1}}}')).values == {"a": 2**63 - 1}


@pytest.mark.parametrize("dtype", ["F32", "C64", "F8_E4M3", "I64"])
def test_no_values_are_finite_whatever_the_shape(dtype: str) -> None:
    data = message(entry(dtype, f"[0,{2**62}]", 0))[:-4]
    assert SCHEMA.receive("up", data)["g"]["x"].shape == (0, 2**62)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_floats_of_8_bits_are_checked_for_finite_values(dtype: str) -> None:
    good = torch.ones(3).to(getattr(torch, dtype))
    data = Message(0, {"g": {"x": good}}).encode()
    assert SCHEMA.receive("up", data)["g"]["x"].dtype == good.dtype
    bad = torch.tensor([1.0, float("nan")]).to(good.dtype)
    with pytest.raises(MessageError, match="non-finite"):
        SCHEMA.receive("up", Message(0, {"g": {"x": bad}}).encode())


def test_a_header_cannot_take_much_more_memory_than_its_bytes() -> None:
    tensors = ",".join(entry("U8", "[0]", 0).replace("x", f"x{n}") for n in range(5_000))
    lists, mappings = ("[" + f"{part}," * 50_000 + "0]" for part in ("[]", '{"":[]}'))
    values = (message(values=f'{{"a":{each}}}') for each in (lists, mappings))
    for data in (message(tensors)[:-4], *values):
        tracemalloc.start()
        Message.decode(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50 * len(data)


def test_a_header_past_its_limit_is_refused_unread() -> None:
    padded = message(values="{}")[8:] + b" " * LARGEST_HEADER
    data = len(padded).to_bytes(8, "little") + padded
    assert State.decode(data).values == {}  # a state is our own file, so only its form counts
    tracemalloc.start()
    with pytest.raises(MessageError, match="header has more than"):
        Message.decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
