"""Data of clients that are read from disk when they are accessed."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from coterie.messages import Groups, Message, State, Tensors
from coterie.runs import RunFolder
from coterie.runs.store import Store, Stored

T_co = TypeVar("T_co", covariant=True)
NOTHING: Tensors = {}
PART = "server-"
"""The beginning of the names of the nested states of a server's value in a checkpoint."""


@dataclass(frozen=True, eq=False)
class InFile:
    """A group of tensors in a file; or all groups of the file, if `group` is None."""

    stored: Stored
    group: str | None = None

    def load(self) -> Any:
        """Read the tensors."""
        state = self.stored.load()
        return state.groups if self.group is None else state[self.group]

    @property
    def is_whole(self) -> bool:
        """Whether the stored state contains no other group."""
        return self.group is None or self.stored.groups.keys() <= {self.group}


@dataclass(frozen=True)
class Upload:
    """A client's upload on disk."""

    tensors: Stored
    values: Stored

    @classmethod
    def put(cls, store: Store, message: Message) -> "Upload":
        """Write an upload to a store."""
        values = {"exchange": message.exchange, "values": dict(message.values)}
        return cls(store.put(State(message.groups)), store.put(State(values=values)))

    def read(self) -> Message:
        """Read the upload."""
        return Message(groups=self.tensors.load().groups, **self.values.load().values)


@dataclass(frozen=True, eq=False)
class Computed:
    """A result that is computed from other items whenever it is accessed."""

    function: Callable[..., Any]
    items: tuple[Any, ...]

    def load(self) -> Any:
        """Compute the result."""
        return self.function(*map(loaded, self.items))


def loaded(item: Any) -> Any:
    """Return the content of an item of a `Lazy` mapping."""
    return item.load() if isinstance(item, InFile | Computed | Stored) else item


def in_file(store: Store, groups: Groups, group: str | None = None) -> InFile:
    """Write groups of tensors to a file.

    Args:
        store: The store to which the groups are written.
        groups: The groups.
        group: The only group, if the item consists of this group; None if it consists of `groups`.

    Raises:
        OverflowError: A tensor is not finite.
        Unwritable: The file cannot be written.
    """
    state = State(groups)
    if not state.is_finite():
        raise OverflowError("a tensor is not finite")
    return InFile(store.put(state), group)


class Lazy(Mapping[str, T_co]):
    """An immutable mapping whose items may be in files.

    An item in a file is read whenever it is accessed. A loop over the items therefore needs the
    memory of one item, but no item should be accessed more often than necessary.

    Args:
        items: The items. If this is a `Lazy` mapping, its items are not read.
    """

    def __init__(self, items: Mapping[str, T_co] | None = None) -> None:
        self.unread: Mapping[str, Any] = dict(unread(items or {}))
        """The items, with an object of class `InFile`, `Computed` or `Stored` instead of the
        content of a file."""

    def __getitem__(self, name: str) -> T_co:  # noqa: D105
        return loaded(self.unread[name])

    def __contains__(self, name: object) -> bool:  # noqa: D105
        return name in self.unread

    def __iter__(self) -> Iterator[str]:  # noqa: D105
        return iter(self.unread)

    def __len__(self) -> int:  # noqa: D105
        return len(self.unread)

    def __hash__(self) -> int:  # noqa: D105  (makes it valid as a default of dataclasses' fields)
        return hash(frozenset(self.unread))


class PerClient(Lazy[T_co]):
    """An immutable mapping from clients' names to data of the clients.

    If a client leaves the run, its entry is removed from all fields of a value that have this type.
    Clients' tensors are in files after each exchange; see `Lazy`.

    Args:
        items: The data of the clients.
    """

    def __or__(self, other: Mapping[str, Any]) -> "PerClient[T_co]":
        """Return the entries of both mappings; the entries of `other` take precedence."""
        return PerClient({**self.unread, **unread(other)})

    def only(self, clients: Collection[str]) -> "PerClient[T_co]":
        """Return the entries of some clients."""
        return PerClient({c: item for c, item in self.unread.items() if c in clients})

    def without(self, client: str) -> "PerClient[T_co]":
        """Return the entries of all other clients, without this client in nested mappings."""

        def less(item: Any) -> Any:
            return item.without(client) if isinstance(item, PerClient) else item

        return PerClient({name: less(item) for name, item in self.unread.items() if name != client})

    def mapped(self, function: Callable[[T_co], Any]) -> "PerClient[Any]":
        """Apply a function to each item whenever the item is accessed."""
        return self.replaced(lambda item: Computed(function, (item,)))

    def updated(self: "PerClient[Tensors]", new: Mapping[str, Tensors]) -> "PerClient[Tensors]":
        """Merge new tensors into each client's tensors, where they replace tensors of equal names.

        Args:
            new: Tensors of some clients, by client and name.
        """
        updated: dict[tuple[int, int], Any] = {}
        clients: dict[str, Any] = {}
        for client, item in unread(new).items():
            old = self.unread.get(client, NOTHING)
            pair = id(old), id(item)  # clients with the same tensors share the result
            if pair not in updated:
                updated[pair] = item if _has_all(item, old) else Computed(_merged, (old, item))
            clients[client] = updated[pair]
        return self | clients

    def replaced(self, change: Callable[[Any], Any]) -> "PerClient[Any]":
        """Apply a function to each unread item; see `Lazy.unread`.

        If several clients have the same item, the function is called once for these clients.
        """
        items = {id(item): item for item in self.unread.values()}
        results = {number: change(item) for number, item in items.items()}
        return PerClient({client: results[id(item)] for client, item in self.unread.items()})


def unread(items: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the items of a mapping without reading files."""
    return items.unread if isinstance(items, Lazy) else items


def _has_all(item: Any, other: Any) -> bool:
    """Return whether it is known that an unread item has all tensors of another."""
    names, others = _names(item), _names(other)
    return names is not None and others is not None and {*others} <= {*names}


def _names(item: Any) -> Collection[str] | None:
    """Return the names of the tensors of an unread item; None if they are unknown."""
    if isinstance(item, Computed):
        return None
    if isinstance(item, InFile):
        return item.stored.groups.get(item.group or "", ())
    return item.keys()


def _merged(old: Tensors, new: Tensors) -> Tensors:
    return {**old, **new}


def server_state(folder: RunFolder) -> State:
    """Return the state of the server's value in the newest checkpoint.

    The nested states are in files of their own, and are read when they are accessed.
    """
    names = folder.states(PART)
    parts = {name.removeprefix(PART): Computed(folder.load, (name,)) for name in names}
    return replace(folder.load("server"), parts=Lazy(parts))
