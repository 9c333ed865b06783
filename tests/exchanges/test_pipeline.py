"""Transforms at both ends, against their definitions."""

from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar

import pytest
import torch
from both_ends import SCHEMA, Ends, a, adapter, example
from turns import nth

from coterie.errors import CoterieError
from coterie.exchanges.codec import ClientTransforms, ServerTransforms
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import Message, MessageError, Schema
from coterie.privacy.ledger import Ledger
from coterie.privacy.mechanisms import noise_for
from coterie.runs.store import Store
from coterie.transforms.contract import Contribution, Reduction, Transform, mapped


def test_without_transforms_messages_are_untouched() -> None:
    ends, message = Ends(), adapter(0)
    client = ends.clients["c0"]
    assert ends.server.download("c0", message) is client.receive(message, nth(0)) is message
    assert client.send(message, nth(0)) is ends.server.upload("c0", message, message) is message
    assert ends.pipeline.schema == SCHEMA


def test_int8_is_the_definition_with_error_feedback_in_both_directions() -> None:
    ends = int8()

    def quantised(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max().clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    held, error_down, error_up = torch.zeros(6), torch.zeros(6), torch.zeros(6)
    for exchange in range(4):
        before, after = adapter(exchange), adapter(10 + exchange)
        wanted = a(before) - held + error_down
        sent = quantised(wanted)
        held, error_down = held + sent, wanted - sent
        got = ends.down(exchange, before)["c0"]
        torch.testing.assert_close(a(got), held)
        wanted = a(after) - held + error_up
        sent = quantised(wanted)
        error_up = wanted - sent
        torch.testing.assert_close(a(ends.up(exchange, {"c0": after}, before)["c0"]), held + sent)


def int8(clients: int = 1) -> Ends:
    return Ends(example("int8").Int8(), clients=clients)


def test_what_did_not_count_is_forgotten_at_both_ends() -> None:
    ends, once = int8(), int8()
    for exchange in range(3):
        before, after = adapter(exchange), adapter(10 + exchange)
        if exchange == 1:  # an upload that is lost: the client restores its state
            state = ends.clients["c0"].state()
            ends.down(exchange, adapter(77))
            ends.clients["c0"].send(adapter(78), nth(exchange))
            ends.clients["c0"].restore(state)
        pairs = []
        for either in (ends, once):
            got = either.down(exchange, before)["c0"]
            pairs.append([a(got), a(either.up(exchange, {"c0": after}, before)["c0"])])
        torch.testing.assert_close(*pairs, rtol=0, atol=0)


def test_noise_is_what_the_budget_asks_for_and_the_ledger_counts_it() -> None:
    transform = example("gaussian").ClippedGaussian(norm=0.5, epsilon=2.0)
    ends, size = Ends(transform, clients=1), 4000
    client = ends.clients["c0"]

    def filled(value: float) -> Message:
        return Message(0, {"adapter": {"A": torch.full((size,), value)}})

    ends.down(0, filled(0.0))
    release, again = (a(client.send(filled(3.0), nth(0))) for _ in range(2))
    assert torch.equal(release, again)  # the same release, told once
    noise = noise_for(2.0, 4, 1e-5)
    assert list(client.ledger.runs[""].values()) == [noise]
    drawn = release - 0.5 / size**0.5
    assert drawn.std().item() == pytest.approx(2 * 0.5 * noise, rel=0.05)
    other = a(client.send(filled(-3.0), nth(0)))
    assert len(client.ledger.runs[""]) == 2
    assert not torch.allclose(other, release - 1 / size**0.5)
    # The budget is spent: nothing of these is in what is sent.
    *_, last = (client.send(filled(1e4 * (i + 1)), nth(1)) for i in range(4))
    assert len(client.ledger.runs[""]) == 4
    assert a(last).mean().abs() < 5 * noise / size**0.5


def test_the_median_is_of_each_number_over_those_who_hold_it() -> None:
    server: Any = Ends(example("median").Median()).server
    rows = torch.randn(5, 7)
    groups = [{"adapter": {"A": row, **({"B": row} if i else {})}} for i, row in enumerate(rows)]
    median = server.reduce((Contribution(str(i), g) for i, g in enumerate(groups)), "01234")
    torch.testing.assert_close(median["adapter"]["A"], rows.median(0).values)
    torch.testing.assert_close(median["adapter"]["B"], rows[1:].quantile(0.5, 0))


class Broken(Transform):
    name: ClassVar[str] = "broken"
    summary: ClassVar[str] = "fails"
    downloads: ClassVar[bool] = True

    how: str = "shape"

    def schema(self, schema: Schema) -> Schema:
        return self.retyped(schema, "float16") if self.how == "dtype" else schema

    def encode(self, update: Any, context: Any) -> Any:
        return mapped(update, lambda t: t[:2]) if self.how == "shape" else update


class Wrong(Reduction):
    """A transform in which one hook returns or raises something."""

    name: ClassVar[str] = "wrong"
    summary: ClassVar[str] = "returns what a test asks for"

    hook: str = ""
    result: Any = None

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name == get("__dict__").get("hook"):
            if isinstance(get("result"), Exception):
                return partial(throw, get("result"))
            return lambda *_: get("result")
        return get(name)

    def reduce(self, contributions: Any, clients: Any, memory: Any) -> Any:
        return next(iter(contributions)).groups

    def tell(self, *_: Any, **__: Any) -> str:
        return ""

    def on_mean(self, mean: Any, *_: Any, **__: Any) -> Any:
        return mean


def throw(error: Exception, *_: Any) -> None:
    raise error


def everything(transform: Transform) -> None:
    """Call every hook of a transform, in an exchange of one client."""
    pipeline = Pipeline([transform], SCHEMA, 1)
    server = ServerTransforms(pipeline, Store(Path(gettempdir())))
    client = ClientTransforms(pipeline, "c0", Ledger())
    server.begin(nth(0), ["c0"])
    download, upload = adapter(0), adapter(1)
    client.receive(server.download("c0", download), nth(0))
    upload = server.upload("c0", client.send(upload, nth(0)), download)
    mean = server.reduce([Contribution("c0", upload.groups)], ["c0"])
    server.on_mean(mean, download.groups)


HOOKS = ["schema", "covered", "encode", "decode", "tell", "reduce", "on_mean"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_one_sentence(hook) -> None:
    everything(Wrong())
    with pytest.raises(CoterieError) as error:
        everything(Wrong(hook=hook, result=KeyError("weights")))
    why = f"The transform 'wrong' failed: {hook} raised KeyError: 'weights'"
    assert str(error.value) == why


INFINITE = {"adapter": {"A": torch.full((6,), torch.inf)}}
SHORT = {"adapter": {"A": torch.ones(5)}}
OTHER = {"adapter": {"A": torch.ones(6), "B": torch.ones(6)}}
NO_TENSORS = "not a mapping from group and name to tensors"
NOT_FINITE = "returned values that are not finite"
TOO_SHORT = r"returned wrong tensors in the group 'adapter': .* shape \(5,\), but \(6,\) was"
IN_ADAPTER = "returned wrong tensors in the group 'adapter': The tensor"
RESULTS: list[tuple[str, Any, str]] = [
    ("schema", None, "returned NoneType, not a Schema"),
    ("encode", {"adapter": 3}, f"returned dict, {NO_TENSORS}"),
    *((hook, None, f"returned NoneType, {NO_TENSORS}") for hook in ("encode", "decode", "on_mean")),
    *((hook, INFINITE, NOT_FINITE) for hook in ("encode", "decode", "reduce")),
    *((hook, SHORT, TOO_SHORT) for hook in ("reduce", "on_mean")),
    ("reduce", {}, f"{IN_ADAPTER} 'A' is missing"),
    ("on_mean", OTHER, f"{IN_ADAPTER} 'B' was not expected"),
]


@pytest.mark.parametrize(("hook", "result", "why"), RESULTS)
def test_a_hook_that_returns_something_else_is_one_sentence(hook, result, why) -> None:
    with pytest.raises(CoterieError, match=f"^The transform 'wrong' failed: {hook} {why}"):
        everything(Wrong(hook=hook, result=result))


FORMER = ["bounded", "declare", "figures", "join", "measure", "refuse", "weight"]


@pytest.mark.parametrize("hook", FORMER)
def test_a_hook_that_is_no_longer_called_is_refused(hook: str) -> None:
    why = f"Mine defines `{hook}`, which Coterie does not call.* define `reduce`; see docs/use/tr"
    for kind in (Transform, Reduction):
        with pytest.raises(CoterieError, match=why):
            type("Mine", (kind,), {hook: lambda self, *_: None})


def test_a_setting_may_have_the_name_of_a_former_hook() -> None:
    class Scaled(Transform):
        name: ClassVar[str] = "scaled"
        summary: ClassVar[str] = "updates are scaled"
        weight: float = 1.0

    assert Scaled(weight=2.0).described() == {"name": "scaled", "weight": 2.0}


def test_a_download_of_another_shape_is_refused_before_it_is_sent() -> None:
    ends = Ends(Broken(how="shape"), clients=1)
    ends.server.begin(nth(0), ends.clients)
    why = r"The transforms 'broken' failed: a decoded download has wrong tensors .* \(2,\), but"
    with pytest.raises(CoterieError, match=why):
        ends.server.download("c0", adapter(0))


def test_an_exchange_that_begins_again_finds_what_the_last_one_left() -> None:
    # Uploads that have arrived are decoded again; no client receives a request for this.
    ends, once = int8(2), int8(2)
    for exchange in range(3):
        before, after = adapter(exchange), adapter(10 + exchange)
        decoded = []
        for either in (ends, once):
            either.down(exchange, before)
            sent = either.wire("up", either.clients["c0"].send(after, nth(exchange)))
            if either is ends:
                either.server.upload("c0", sent, before)
                either.server.begin(nth(exchange), either.clients)
            decoded.append(a(either.server.upload("c0", sent, before)))
            either.server.commit(["c0"])
        assert torch.equal(*decoded)


def test_a_dtype_that_is_not_declared_is_not_sent() -> None:
    ends = Ends(Broken(how="dtype"), clients=1)
    with pytest.raises(MessageError, match="float32"):
        ends.wire("up", ends.clients["c0"].send(adapter(1), nth(0)))


@pytest.mark.parametrize(("name", "kind", "writes"), [("median", "Median", 0), ("int8", "Int8", 1)])
def test_a_download_is_written_once_and_only_if_it_is_encoded(name, kind, writes) -> None:
    ends, message = Ends(getattr(example(name), kind)(), clients=1), adapter(0)
    put, calls = ends.server.store.put, []
    ends.server.store.put = lambda state: (calls.append(state), put(state))[1]
    ends.down(0, message)
    ends.up(0, {"c0": adapter(1)}, message)
    assert len(calls) == writes
    assert a(ends.server.download("c0", message)).dtype == (torch.int8 if writes else torch.float32)
