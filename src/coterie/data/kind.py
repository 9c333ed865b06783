"""The interface of a kind of data, and the registry of kinds.

Each built-in kind is in a file of its own in `data/kinds/`, which is imported when the kind's name
is first looked up. This module does not import torch. docs/develop/metrics-and-data.md describes
how to write a kind.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from coterie.data.files import Record
from coterie.data.measured import Needs
from coterie.registry import Registry, Section

if TYPE_CHECKING:
    from coterie.data.examples import Encoding
    from coterie.data.split import Split


class DataKind(Section):
    """A kind of data, which reads records as items, and encodes items as a split of tokens.

    A subclass defines `name`, `summary`, `used`, `items` and `encode`, and is registered with
    `coterie.register` or loaded with `--plugin FILE.py`. The class's pydantic fields are the kind's
    settings in the run file (`data.kind`). The class variable `offers` names the inputs that the
    kind's splits provide for metrics. A metric can be computed if its `Metric.needs` is one of
    these names. It is "nothing" if a metric needs no input besides the losses, so `offers` should
    include "nothing". The following kind, for example, reads instructions from the record
    fields `question` and `answer`::

        class Questions(DataKind):
            name = "questions"
            summary = "a question with its answer"
            offers = frozenset({"nothing", "answers"})

            def used(self):
                return {"question", "answer"}

            def items(self, records):
                return [
                    Instruction(r.text(["question"]), r.text(["answer"]), where=r.where)
                    for r in records
                ]

            def encode(self, items, how):
                return examples(items, how)  # from coterie.data.kinds.instructions
    """

    name: ClassVar[str]
    """The kind's name in run files (`data.kind`)."""
    summary: ClassVar[str]
    """A one-line description of a record."""
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing"})
    """The inputs of metrics that the kind's splits provide.

    A metric names its input in `Metric.needs`. Metrics that need only the losses name "nothing".
    """
    compares: ClassVar[bool] = False
    """Whether the loss compares several answers to a prompt.

    If the loss compares answers, the kind works only with methods that train through
    `LocalTraining`, and a public set cannot be of this kind.
    """
    referenced: ClassVar[bool] = False
    """Whether the loss compares the model with a reference model (`training.dpo`)."""
    rows: ClassVar[int] = 1
    """The approximate number of samples per item, for estimates of memory."""

    @property
    def chats(self) -> bool:
        """Whether records are rendered through a chat template."""
        return False

    def has_chats(self, items: Sequence[Any]) -> bool:
        """Return whether at least one of the items is rendered through a chat template.

        Args:
            items: Items that this kind has read.

        Returns:
            By default, the value of `chats`.
        """
        return self.chats

    def used(self) -> set[str]:
        """Return the record fields that the kind reads.

        Returns:
            The names of the fields. The command `coterie data` reports all other fields as unused.
        """
        raise NotImplementedError

    def items(self, records: Sequence[Record]) -> Iterable[Any]:
        """Read records as items.

        Args:
            records: All records of one source (a file, a folder or a data set), in order.

        Returns:
            One item per record, in order. An item is immutable and has the properties of
            `coterie.data.items.Item`.

        Raises:
            CoterieError: A record is invalid. The message begins with `record.where`.
        """
        raise NotImplementedError

    def encode(self, items: Sequence[Any], how: "Encoding") -> "Split":
        """Encode items as a split of tokens.

        Args:
            items: Items that this kind has read.
            how: The tokenizer and the settings of the encoding, such as the window and the maximum
                number of samples.

        Returns:
            The split. Items that do not fit the window are left out. The number of these items is
            part of `Split.counts`.

        Raises:
            CoterieError: No item is left. The method `how.nothing` creates the error.
        """
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """Describe the kind as in a run file.

        Returns:
            The value of the run file's key `data.kind`: a mapping with `name` and the settings.
        """
        return {"name": self.name, **self.model_dump(mode="json")}


OWN = {
    "text": "text:Text",
    "instructions": "instructions:Instructions",
    "messages": "conversations:Messages",
    "preferences": "preferences:Preferences",
}
"""The module and class of each built-in kind, by the kind's name."""
DATA_KINDS: Registry[type[DataKind]] = Registry(
    noun="data kind",
    builtin={name: partial(resolve_name, f"coterie.data.kinds.{k}") for name, k in OWN.items()},
    group="coterie.data_kinds",
    base="coterie.data.kind:DataKind",
    requires={"summary": ": a one-line description of a record"},
)
