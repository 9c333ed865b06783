"""Values of servers: saving, restoring and forgetting a client follow from the fields' types."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from coterie.deployment.forgetting import _state_without, _texts
from coterie.errors import CoterieError
from coterie.exchanges.lazy import PART
from coterie.messages import Groups, State, Tensors
from coterie.methods.sides import Server
from coterie.methods.value import PerClient, Value, from_hello


@dataclass(frozen=True, eq=False)
class Everything(Value):
    shared: Tensors = field(default_factory=dict)
    clusters: tuple[Tensors, ...] = ()
    means: PerClient[Tensors] = PerClient()
    uploads: PerClient[Groups] = PerClient()
    tokens: PerClient[int] = PerClient()
    rows: PerClient[PerClient[float]] = PerClient()
    ranks: PerClient[dict[str, int]] = PerClient()
    notes: dict[str, list[float | None]] = field(default_factory=dict)
    count: int = 0
    held: PerClient[frozenset[str]] = from_hello()


def tensors(*values: float) -> Tensors:
    return {f"t{i}": torch.tensor([value, 2.0]) for i, value in enumerate(values)}


def example() -> Everything:
    mean = tensors(1.0)
    other = {"cyd": {**mean, "own": torch.ones(1)}, "dan": {"other": mean["t0"]}}
    return Everything(
        shared=tensors(3.0, 4.0),
        clusters=({}, tensors(5.0), tensors(6.0)),
        means=PerClient({"eve": mean, "bob": mean, **other, "fay": {}, "gil": {}}),
        uploads=PerClient({"eve": {"a": tensors(7.0), "b": {}}, "bob": {}}),
        tokens=PerClient({"eve": 3, "cyd": 4}),
        rows=PerClient({"eve": PerClient({"eve": 0.5, "bob": 0.5}), "cyd": PerClient()}),
        ranks=PerClient({"eve": {"bob": 4}}),  # "bob" is the name of a tensor here
        notes={"x": [1.5, None]},
        count=2,
        held=PerClient({"eve": frozenset("xy")}),
    )


def plain(content: Any) -> Any:
    """Convert content to objects that `==` can compare."""
    if isinstance(content, torch.Tensor):
        return content.tolist()
    if isinstance(content, Mapping):
        return {key: plain(item) for key, item in content.items()}
    return [*map(plain, content)] if isinstance(content, tuple | list) else content


def saved(value: Value) -> State:
    """Return the state after its bytes have been written and read."""
    return State.decode(value.state().encode())


def test_every_field_comes_back_from_its_bytes() -> None:
    before = example()
    after = Everything(held=PerClient({"bob": frozenset()})).restored(saved(before))
    assert plain(before.uploads) == {"eve": {"a": plain(tensors(7.0)), "b": {}}, "bob": {}}
    assert plain(after.uploads) == {"eve": {"a": plain(tensors(7.0))}, "bob": {}}
    for name in vars(before):
        if name not in ("held", "uploads"):
            assert plain(getattr(after, name)) == plain(getattr(before, name)), name
    assert isinstance(after.rows["eve"], PerClient)
    assert {*after.held} == {"bob"}  # clients send their hellos again
    assert saved(after).encode() == saved(before).encode()
    assert plain(vars(Everything().restored(saved(Everything())))) == plain(vars(Everything()))


def test_tensors_that_clients_have_in_common_are_saved_once_and_shared_again() -> None:
    state = saved(example())
    means = [name for name in state.parts if name.startswith("means")]
    assert means == ["means-cyd", "means-dan", "means-fay", "means-gil", "means.0"]
    assert state.parts["means-cyd"]["tensors"].keys() == {"t0", "own"}
    again = Everything().restored(state)
    assert again.means.unread["eve"] is again.means.unread["bob"]
    assert saved(again).encode() == state.encode()


def test_nothing_is_left_of_a_client() -> None:
    value = example().without("bob")
    assert {*value.means} == {"eve", "cyd", "dan", "fay", "gil"}
    assert plain(value.rows) == {"eve": {"eve": 0.5}, "cyd": {}}
    assert value.ranks["eve"] == {"bob": 4}  # names of tensors stay
    value = value.without("eve")
    assert b"eve" not in value.state().encode()
    assert {*value.tokens} == {"cyd"}
    assert "eve" not in value.means
    assert not value.held
    assert {*example().held} == {"eve"}  # a value does not change


def test_a_state_without_a_client_is_that_of_the_value_without_it() -> None:
    # Checkpoints are cleaned without the method.
    whole = saved(example())
    top = whole.without("eve")
    named = {*_texts(top.values)}
    parts = {n: _state_without(f"{PART}{n}", part, "eve", named) for n, part in whole.parts.items()}
    assert {name for name, part in parts.items() if part is None} == {"uploads-eve"}
    state = replace(top, parts={name: part for name, part in parts.items() if part is not None})
    without = example().without("eve")
    expected = plain(vars(without.restored(saved(without)))) | {"held": {}}
    assert plain(vars(Everything().restored(state))) == expected


def test_nothing_is_left_of_tensors_that_forgotten_clients_had_in_common() -> None:
    whole = saved(example())
    assert "means.0" in whole.parts  # of eve and bob
    rest = whole.without("eve")
    for left, name in ((rest, "eve"), (rest.without("bob"), "bob")):
        named = {*_texts(left.values)}
        state = _state_without(f"{PART}means.0", whole.parts["means.0"], name, named)
        assert (state is None) == (name == "bob")


def test_mappings_become_per_client() -> None:
    # A client that leaves would otherwise stay in a dictionary.
    given: Any = {"means": {"eve": tensors(1.0)}, "rows": {"bob": {"eve": 1.0}}}
    value = Everything(**given)
    assert not value.without("eve").means
    assert plain(value.without("eve").rows) == {"bob": {}}


ODD = [set[str], object, torch.Tensor, dict[int, str], PerClient[bytes], list[PerClient[int]]]


@pytest.mark.parametrize("kind", ODD)
def test_a_field_that_cannot_be_saved_is_refused_before_the_run(kind) -> None:
    @dataclass(frozen=True, eq=False)
    class Odd(Value):
        entry: Any = None

    Odd.__annotations__["entry"] = kind
    with pytest.raises(CoterieError, match="The field 'entry' of Odd cannot be saved"):
        Odd()


@pytest.mark.parametrize("hook", ["close", "receive", "averaged", "end_round", "state"])
def test_a_server_with_hooks_that_are_not_called_is_refused(hook) -> None:
    # Otherwise, its algorithm would be ignored without an error.
    with pytest.raises(CoterieError, match=f"Mine defines `{hook}`, which Coterie does not call"):
        type("Mine", (Server,), {hook: lambda self: None})
