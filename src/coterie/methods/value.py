"""The data that a method's server keeps between exchanges, as an immutable value.

A value is a frozen dataclass that a method's `Server` creates and the engine stores. The types of
the fields determine how a value is saved and restored, and what is removed when a client leaves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from typing import is_typeddict as is_typed_dict

from coterie.errors import CoterieError
from coterie.messages import Groups, State, Tensors
from coterie.messages.message import NAME
from coterie.training.context import ClientId

T_co = TypeVar("T_co", covariant=True)
Kind = Literal["tensors", "list of tensors", "client's tensors", "client's groups", "JSON"]
"""The form in which a field is saved."""


class PerClient(Mapping[ClientId, T_co]):
    """An immutable mapping from clients' names to data of the clients.

    If a client leaves the run, its entry is removed from all fields of a value that have this type.

    Args:
        items: The data of the clients.
    """

    def __init__(self, items: Mapping[ClientId, T_co] | None = None) -> None:
        self._items: Mapping[ClientId, T_co] = dict(items or {})

    def __getitem__(self, client: ClientId) -> T_co:  # noqa: D105
        return self._items[client]

    def __iter__(self) -> Iterator[ClientId]:  # noqa: D105
        return iter(self._items)

    def __len__(self) -> int:  # noqa: D105
        return len(self._items)

    def __hash__(self) -> int:  # noqa: D105  (makes it valid as a default of dataclasses' fields)
        return hash(frozenset(self._items))

    def __or__(self, other: Mapping[ClientId, Any]) -> "PerClient[T_co]":
        """Return the entries of both mappings; the entries of `other` take precedence."""
        return PerClient({**self._items, **other})

    def without(self, client: ClientId) -> "PerClient[T_co]":
        """Return the entries of all other clients, without this client in nested mappings."""

        def less(item: Any) -> Any:
            return item.without(client) if isinstance(item, PerClient) else item

        return PerClient({name: less(item) for name, item in self.items() if name != client})


def from_hello() -> Any:
    """Return an empty field that `join` fills.

    The field is not saved, because after a restart of the server, `join` is called again with the
    clients' first messages.
    """
    return field(default_factory=PerClient, metadata={"saved": False})


@dataclass(frozen=True, eq=False)
class Value:
    """The base class of values. Subclasses are frozen dataclasses with `eq=False`.

    Saved fields have one of these types: `Tensors`; `tuple[Tensors, ...]`; `PerClient[Tensors]`;
    `PerClient[Groups]`; a JSON type (`int`, `float`, `str`, `bool`, `None`, lists, and mappings
    with keys of type `str`); `PerClient` of a JSON type; or `PerClient[PerClient[...]]` of a JSON
    type. Any mapping that is given for a `PerClient` becomes one.

    Raises:
        CoterieError: A saved field has another type. The message names the field.
    """

    def __post_init__(self) -> None:  # noqa: D105
        _kinds(type(self))  # refuses fields that cannot be saved
        for name, annotation in _types(type(self)).items():
            object.__setattr__(self, name, _typed(getattr(self, name), annotation))

    def state(self) -> State:
        """Return the fields as a state from which `restored` makes an equal value."""
        groups: dict[str, Tensors] = {}
        values: dict[str, Any] = {}
        of_clients: dict[ClientId, State] = {}
        for name, kind in _kinds(type(self)).items():
            content = getattr(self, name)
            match kind:
                case "tensors":
                    groups[name] = content
                case "list of tensors":
                    groups |= {f"{name}-{number}": item for number, item in enumerate(content)}
                    values[name] = len(content)
                case "client's tensors":
                    common, numbers = _common(content)
                    groups |= {f"{name}-{number}": item for number, item in enumerate(common)}
                    values[name] = numbers
                    for client in sorted(c for c, number in numbers.items() if number is None):
                        state = of_clients.get(client, State())
                        own = {**state.groups, name: content[client]}
                        of_clients[client] = replace(state, groups=own)
                case "client's groups":
                    values[name] = {client: [*item] for client, item in content.items()}
                    for client, item in sorted(content.items()):
                        state = of_clients.get(client, State())
                        parts = {**state.parts, name: State(item)}
                        of_clients[client] = replace(state, parts=parts)
                case "JSON":
                    values[name] = _plain(content)
        return State(groups, values, of_clients)

    def restored(self, state: State) -> Self:
        """Return this value with the saved fields of a state; other fields do not change.

        Args:
            state: A state that `state()` of a value of this class returned.
        """
        saved: dict[str, Any] = {}
        for name, kind in _kinds(type(self)).items():
            match kind:
                case "tensors":
                    saved[name] = state[name]
                case "list of tensors":
                    numbers = range(state.values[name])
                    saved[name] = tuple(state[f"{name}-{number}"] for number in numbers)
                case "client's tensors":
                    saved[name] = {
                        c: _of(state, c)[name] if number is None else state[f"{name}-{number}"]
                        for c, number in state.values[name].items()
                    }
                case "client's groups":
                    saved[name] = {
                        c: {g: _of(_of(state, c), name)[g] for g in groups}
                        for c, groups in state.values[name].items()
                    }
                case "JSON":
                    saved[name] = state.values[name]
        return replace(self, **saved)

    def without(self, client: ClientId) -> Self:
        """Return this value without the data of a client."""
        contents = ((f.name, getattr(self, f.name)) for f in fields(self))
        less = {n: c.without(client) for n, c in contents if isinstance(c, PerClient)}
        return replace(self, **less)


@cache
def _types(cls: type[Value]) -> dict[str, Any]:
    """Return the type of each field of a class."""
    return get_type_hints(cls)


@cache
def _kinds(cls: type[Value]) -> dict[str, Kind]:
    """Return how each saved field of a class is saved, after checking that it can be saved."""
    kinds: dict[str, Kind] = {}
    for item in fields(cls):
        if not item.metadata.get("saved", True):
            continue
        annotation = _types(cls)[item.name]
        if (kind := _kind(annotation)) is None or not NAME.fullmatch(item.name):
            raise CoterieError(
                f"The field {item.name!r} of {cls.__name__} cannot be saved: its name must begin "
                f"with a letter, and its type is {annotation}; the class `Value` lists the types "
                "that can be saved."
            )
        kinds[item.name] = kind
    return kinds


def _kind(annotation: Any) -> Kind | None:
    """Return how a field of a type is saved; None if it cannot be saved."""
    if annotation == Tensors:
        return "tensors"
    if annotation == tuple[Tensors, ...]:
        return "list of tensors"
    if get_origin(annotation) is PerClient:
        [inner] = get_args(annotation)
        if inner == Tensors:
            return "client's tensors"
        if inner == Groups:
            return "client's groups"
        annotation = get_args(inner)[0] if get_origin(inner) is PerClient else inner
    return "JSON" if _is_json(annotation) else None


def _is_json(annotation: Any) -> bool:
    if annotation in (int, float, str, bool, NoneType) or is_typed_dict(annotation):
        return True
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (dict, Mapping):
        return args[0] is str and _is_json(args[1])
    return origin in (list, Union, UnionType) and all(map(_is_json, args))


def _plain(content: Any) -> Any:
    """Return JSON in which each `PerClient` is a dictionary."""
    if isinstance(content, PerClient):
        return {client: _plain(item) for client, item in content.items()}
    return content


def _typed(content: Any, annotation: Any) -> Any:
    """Return a content in which mappings are `PerClient` where a type requires it."""
    if get_origin(annotation) is not PerClient:
        return content
    [inner] = get_args(annotation)
    if isinstance(content, PerClient) and get_origin(inner) is not PerClient:
        return content
    return PerClient({client: _typed(item, inner) for client, item in content.items()})


def _of(state: State, name: str) -> State:
    """Return a nested state; it is empty if it was not saved because it has no tensors."""
    return state.parts.get(name, State())


def _common(tensors: PerClient[Tensors]) -> tuple[list[Tensors], dict[ClientId, int | None]]:
    """Find mappings that several clients have in common, so that they are saved once.

    Returns:
        These mappings, and for each client the index of its mapping, or None if no other client
        has the same mapping.
    """
    clients: dict[tuple[tuple[str, int], ...], list[ClientId]] = {}
    for client, item in sorted(tensors.items()):
        clients.setdefault(tuple((n, id(t)) for n, t in item.items()), []).append(client)
    several = [names for names in clients.values() if len(names) > 1]
    numbers = {name: number for number, names in enumerate(several) for name in names}
    return [tensors[n[0]] for n in several], {c: numbers.get(c) for c in sorted(tensors)}
