"""The data that a method's server keeps between exchanges, as an immutable value.

A value is a frozen dataclass that a method's `Server` creates and the engine stores. The types of
the fields determine how a value is saved and restored, and what is removed when a client leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints
from typing import is_typeddict as is_typed_dict

from coterie.errors import CoterieError
from coterie.exchanges.lazy import Computed, InFile, Lazy, PerClient, in_file, loaded, unread
from coterie.messages import Groups, State, Tensors
from coterie.messages.message import NAME
from coterie.runs.store import Store, Stored
from coterie.training.context import ClientId

TENSORS = "tensors"
"""The name of the only group in the state of a client's tensors."""
Kind = Literal["tensors", "list of tensors", "client's tensors", "client's groups", "JSON"]
"""The form in which a field is saved."""


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
    type. Any mapping that is given for a `PerClient` becomes one. After each exchange, the engine
    moves the tensors of `PerClient` to files; groups without tensors are then left out.

    Raises:
        CoterieError: A saved field has another type. The message names the field.
    """

    def __post_init__(self) -> None:  # noqa: D105
        _kinds(type(self))  # refuses fields that cannot be saved
        for name, annotation in _types(type(self)).items():
            object.__setattr__(self, name, _typed(getattr(self, name), annotation))

    def stored(self, store: Store) -> Self:
        """Return this value with all clients' tensors in files.

        Args:
            store: The store to which the tensors are written.

        Raises:
            OverflowError: A tensor is not finite.
            Unwritable: A file cannot be written.
        """

        def put(group: str | None, item: Any) -> InFile:
            if isinstance(item, InFile) and item.is_whole and (group is None or item.group):
                return item
            content = loaded(item)
            return in_file(store, {group: content} if group else content, group)

        items = self._items_of_clients()
        return replace(self, **{n: c.replaced(partial(put, g)) for n, (c, g) in items.items()})

    def _items_of_clients(self) -> dict[str, tuple[PerClient[Any], str | None]]:
        """Return the fields with clients' tensors; the group is None if a client has several."""
        kinds = {"client's tensors": TENSORS, "client's groups": None}
        of_clients = ((n, kinds[k]) for n, k in _kinds(type(self)).items() if k in kinds)
        return {name: (getattr(self, name), group) for name, group in of_clients}

    def state(self) -> State:
        """Return the fields as a state from which `restored` makes an equal value.

        The tensors of a client are in a nested state, whose name is FIELD-CLIENT. If several
        clients have the same tensors, the name is FIELD.NUMBER.
        """
        groups: dict[str, Tensors] = {}
        values: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        for name, kind in _kinds(type(self)).items():
            content = getattr(self, name)
            match kind:
                case "tensors":
                    groups[name] = content
                case "list of tensors":
                    groups |= {f"{name}-{number}": item for number, item in enumerate(content)}
                    values[name] = len(content)
                case "JSON":
                    values[name] = _plain(content)
        for name, (content, group) in self._items_of_clients().items():
            values[name], items = _parts(name, content)
            parts |= {part: _state_of(item, group) for part, item in items.items()}
        return State(groups, values, Lazy(parts))

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
                case "JSON":
                    saved[name] = state.values[name]
        for name, (_, group) in self._items_of_clients().items():
            parts, items_of = state.values[name], unread(state.parts)
            items = {part: _item_of(items_of[part], group) for part in {*parts.values()}}
            saved[name] = {client: items[part] for client, part in parts.items()}
        return replace(self, **saved)

    def without(self, client: ClientId) -> Self:
        """Return this value without the data of a client."""
        contents = ((f.name, getattr(self, f.name)) for f in fields(self))
        less = {n: c.without(client) for n, c in contents if isinstance(c, PerClient)}
        return replace(self, **less)


_types = cache(get_type_hints)
"""The type of each field of a class."""


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
                f"The field {item.name!r} of {cls.__name__} cannot be saved: its name must be "
                f"ASCII, and its type is {annotation}; the class `Value` lists the types "
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
    return PerClient({client: _typed(item, inner) for client, item in unread(content).items()})


def _parts(name: str, content: PerClient[Any]) -> tuple[dict[ClientId, str], dict[str, Any]]:
    """Name the nested states of a field; see `Value.state`.

    Returns:
        The name of each client's nested state, and the unread item of each nested state.
    """
    clients: dict[int, list[ClientId]] = {}
    for client, item in sorted(content.unread.items()):
        clients.setdefault(id(item), []).append(client)
    several = [names for names in clients.values() if len(names) > 1]
    parts = {client: f"{name}-{client}" for client in sorted(content)}
    parts |= {c: f"{name}.{number}" for number, names in enumerate(several) for c in names}
    return parts, {part: content.unread[client] for client, part in parts.items()}


def _state_of(item: Any, group: str | None) -> State | Stored:
    """Return the nested state of an unread item."""
    if isinstance(item, InFile) and item.is_whole:
        return item.stored
    content = loaded(item)
    return State({group: content} if group else content)


def _item_of(item: Any, group: str | None) -> InFile | Computed:
    """Return the unread content of an unread nested state."""
    if isinstance(item, Stored):
        return InFile(item, next(iter(item.groups), group) if group else None)
    return Computed(_only_group if group else _groups, (item,))


def _groups(state: State) -> Groups:
    return state.groups


def _only_group(state: State) -> Tensors:
    return next(iter(state.groups.values()), {})
