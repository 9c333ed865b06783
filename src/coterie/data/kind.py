"""What a kind of data is, and the kinds by name: own ones, registered ones and those of plugins.

The package's own kinds are in `data/kinds/`, one file each. A kind is imported when it is asked for
by its name; names, settings and what a kind declares need no torch.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from coterie.data.files import Record
from coterie.data.measured import Needs
from coterie.errors import CoterieError
from coterie.registry import Registry, check_named

if TYPE_CHECKING:
    from coterie.data.examples import Encoding
    from coterie.data.split import Split


class DataKind(BaseModel):
    """A kind of data: how records become items, and items a split.

    A subclass defines `name`, `summary`, `used`, `items` and `encode`. Its fields are its settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    """In run files: `data.kind`."""
    summary: ClassVar[str]
    """What a record is, in one line."""
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing"})
    """What metrics can be computed from."""
    compares: ClassVar[bool] = False
    """Whether the loss compares several answers to a prompt. Methods that learn in another way than
    by local training cannot learn such a kind, and no public set can be of it."""
    referenced: ClassVar[bool] = False
    """Whether the loss compares the model with a reference, as `training.dpo` describes."""
    rows: ClassVar[int] = 1
    """Samples that an item is read as, about; for estimates of memory."""

    @property
    def chats(self) -> bool:
        """Whether records are rendered through a chat template."""
        return False

    def has_chats(self, items: Sequence[Any]) -> bool:
        """Return whether a chat template renders any of these items."""
        return self.chats

    def used(self) -> set[str]:
        """Return the fields of a record that are read."""
        raise NotImplementedError

    def items(self, records: Sequence[Record]) -> Iterable[Any]:
        """Return the item of every record of one source, in their order.

        An item is frozen and has the properties of `coterie.data.items.Item`.

        Raises:
            CoterieError: A record is of no use; the error begins with `record.where`.
        """
        raise NotImplementedError

    def encode(self, items: Sequence[Any], how: "Encoding") -> "Split":
        """Return items as tokens; those that do not fit the window are left out and counted.

        Raises:
            CoterieError: No item is left; see `how.nothing`.
        """
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """Return name and settings as a run file would give them."""
        return {"name": self.name, **self.model_dump(mode="json")}


def register(kind: Any) -> Any:
    """Register a class of data under its `name`, for as long as this process runs.

    Returns:
        The class, so that the function can be used as a decorator.

    Raises:
        CoterieError: The class is no kind of data with a name and a summary, or the name is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, DataKind)):
        raise CoterieError(
            f"{kind!r} is not a kind of data; it must be a subclass of coterie.DataKind."
        )
    check_named(kind, DATA_KINDS.noun, "summary", ": one line on what a record is")
    DATA_KINDS.add(kind.name, kind)
    return kind


def _builtin(file: str, name: str) -> type[DataKind]:
    return getattr(import_module(f"coterie.data.kinds.{file}"), name)


OWN = {
    "text": ("text", "Text"),
    "instructions": ("instructions", "Instructions"),
    "messages": ("conversations", "Messages"),
    "preferences": ("preferences", "Preferences"),
}
"""The package's own kinds: by name, the file and the class."""
DATA_KINDS: Registry[type[DataKind]] = Registry(
    noun="data kind",
    builtin={name: partial(_builtin, *home) for name, home in OWN.items()},
    group="coterie.data_kinds",
    accept=register,
    advice="--plugin FILE.py adds your own.",
)
