"""The run file's section `divide:`, which divides one data set among clients.

An invalid value raises a pydantic `ValidationError` whose message is a sentence for the user.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coterie.data.spec import PIECE
from coterie.names import ClientName, check_distinct
from coterie.registry import Section

Label = Annotated[str, Field(coerce_numbers_to_str=True)]
Share = Annotated[float, Field(gt=0, le=1)]
USED_BY = {
    "clients": ("dirichlet", "even"),
    "alpha": ("dirichlet",),
    "share": ("mixture",),
    "mixtures": ("mixtures",),
    "balanced": ("dirichlet",),
    "parts": ("even",),
    "held_out": ("label", "dirichlet", "mixture", "mixtures"),
}
"""For each option, the values of `by` that use the option."""


class SourceSpec(Section):
    """A label's entry in `divide.source`, if the entry is a mapping with `source` and `subset`."""

    source: str
    """file, folder, or hub name of a data set"""
    subset: str | None = None
    """subset (configuration) of a hub data set"""


class DivideSpec(Section):
    """The run file's section `divide:`, which divides one labelled data set among clients."""

    source: str | dict[Label, str | SourceSpec]
    """file, folder, or hub name of a data set; or a mapping of each label to a file, a folder or a
    hub name, or to a mapping with `source` and `subset`"""
    subset: str | None = None
    """subset (configuration) of a hub data set"""
    split: str = "train"
    """split of a hub data set to divide"""
    validation: str | None = None
    """the data set's own validation text, divided in the proportions of the training text: split of
    a hub data set, or file or folder; default: the fraction data.fractions.validation of the
    divided text"""
    test: str | None = None
    """the data set's own test text, divided in the proportions of the training text: split of a hub
    data set, or file or folder; default: the fraction data.fractions.test of the divided text"""
    where: str | None = Field(default=None, min_length=1)
    """Jinja expression over a record's fields, such as `output | wordcount > 10`; other records are
    left out"""
    by: Literal["label", "dirichlet", "mixture", "mixtures", "even"]
    """way to divide: one label per client (label), Dirichlet shares (dirichlet), mostly one label
    per client (mixture), given label shares (mixtures), or equal random parts (even)"""
    label: str = "label"
    """field that contains a record's label (not used by even)"""
    clients: int | None = Field(default=None, ge=1)
    """number of clients (dirichlet and even only)"""
    parts: int | None = Field(default=None, ge=1)
    """number of equal parts into which the records are divided; each client takes one part, and so
    does the public set; default: as many as are needed (even only)"""
    alpha: float | None = Field(default=None, gt=0)
    """Dirichlet concentration; larger values give more even shares (dirichlet only)"""
    balanced: bool = False
    """assign no further labels to a client that has an even share of the records (dirichlet
    only)"""
    share: float | None = Field(default=None, ge=0, le=1)
    """share of a client's own label in the client's text (mixture only)"""
    mixtures: dict[ClientName, dict[Label, Share]] | None = None
    """label shares of each client, as fractions of characters (with instructions: of samples)
    (mixtures only)"""
    piece: int = Field(default=PIECE, ge=20)
    """minimum length, in characters, of the pieces that .txt files are cut into; the maximum length
    is twice the minimum"""
    held_out: Literal["own", "uniform"] = "own"
    """label shares in the validation and test splits: as in the client's training text (own), or
    equal for all labels (uniform); not used by even"""
    public: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """size of the public set: with even, `true` sets aside one more part, as large as a client's
    part; otherwise, a fraction of the text that could be divided among the clients, with the label
    shares of all clients' texts together; false: no public set"""

    @property
    def taken(self) -> int:
        """The number of equal parts that are used: one per client, and one for any public set."""
        return (self.clients or 0) + bool(self.public)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        for option, ways in USED_BY.items():
            given = getattr(self, option) != type(self).model_fields[option].default
            if given and self.by not in ways:
                raise ValueError(f"dividing by {self.by} does not use {option}; remove it")
            if not given and self.by in ways and option not in ("balanced", "parts", "held_out"):
                raise ValueError(f"dividing by {self.by} needs {option}; set divide.{option}")
        if self.parts is not None and self.parts < self.taken:
            raise ValueError(
                f"divide.parts is {self.parts}, but clients and the public set need {self.taken}; "
                f"set it to {self.taken} or more"
            )
        if self.public is not False and (self.public is True) != (self.by == "even"):
            expected = "true" if self.by == "even" else "a fraction, such as 0.1"
            raise ValueError(f"dividing by {self.by} needs divide.public to be {expected}")
        return self

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if not self.source:
            raise ValueError("divide.source is empty; name a file, a folder or a hub data set")
        if not isinstance(self.source, str) and self.subset is not None:
            raise ValueError(
                "divide.subset needs a single source; with one source per label, give each "
                "label its own `subset`"
            )
        if not isinstance(self.source, str) and not self.validation == self.test is None:
            raise ValueError(
                "divide.validation and divide.test need a single source; with one source per "
                "label, remove both, or replace `divide` with `clients` and give each client its "
                "own splits"
            )
        return self

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        if self.mixtures is not None and not self.mixtures:
            raise ValueError("divide.mixtures has no clients; add at least one")
        check_distinct(self.mixtures or (), "divide.mixtures")
        for client, shares in (self.mixtures or {}).items():
            total = sum(shares.values())
            if abs(total - 1) > 1e-6:
                raise ValueError(
                    f"the shares of client {client} in divide.mixtures sum to {total:g}; they must "
                    "sum to 1"
                )
        return self
