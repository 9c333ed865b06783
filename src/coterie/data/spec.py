"""How a run file describes its texts: what is read, how it is split, and how it is divided.

These models are the shape of the run file's sections `data:`, `clients:` and `divide:`. A value out
of range is a pydantic `ValidationError` whose message is a sentence for the user.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

PIECE = 2000
"""Characters of the pieces, about, into which a text file is cut before it is split."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _plain(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            f"the name {name!r} must be 1 to 64 letters, digits, dots, dashes and "
            "underscores, and must not start with a dot or dash"
        )
    return name


ClientName = Annotated[str, AfterValidator(_plain)]


class ClientLimits(_Spec):
    """At most so much of a client's split is kept, from its start; without a limit, all.

    A limit counts tokens, or samples where the data are instructions.
    """

    train: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of training tokens (with instructions: samples); default: all",
    )
    validation: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of validation tokens (or samples); default: all",
    )
    test: int | None = Field(
        default=None, ge=1, description="maximum number of test tokens (or samples); default: all"
    )


class Limits(ClientLimits):
    """The limits of all clients, and of the public set."""

    public: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of tokens (or samples) of the public set; default: all",
    )


class Fractions(_Spec):
    """The shares that are set aside, of a text's characters or of samples; the rest is to train."""

    validation: float = Field(
        default=0.1, gt=0, lt=1, description="fraction set aside for validation"
    )
    test: float = Field(default=0.1, gt=0, lt=1, description="fraction set aside for testing")

    @model_validator(mode="after")
    def _leave_some_to_train(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"the fractions validation ({self.validation}) and test ({self.test}) leave nothing"
                " to train on; their sum must be below 1"
            )
        return self


Choice = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]


class InstructionSpec(_Spec):
    """How records become prompts with answers: the run file's section `data.instructions:`."""

    template: str = Field(
        default="alpaca",
        min_length=1,
        description="prompt template: alpaca, snli or plain; the path of a .jinja file; or "
        "Jinja text over a record's fields, such as '{{ question }} Answer:'",
    )
    answer: str = Field(
        default="output",
        min_length=1,
        description="field that contains the answer, or Jinja text that renders it",
    )
    choices: Annotated[list[Choice], Field(min_length=2)] | str | None = Field(
        default=None,
        description="answers to choose from, for accuracy: a list, a field that contains one, "
        "or Jinja text that renders one per line; default: the distinct answers of "
        "a source's records with the same `instruction`, if there are 2 to 20",
    )

    @field_validator("choices", mode="before")
    @classmethod
    def _are_text(cls, choices: Any) -> Any:
        if isinstance(choices, list) and any(isinstance(choice, bool) for choice in choices):
            raise ValueError(
                "data.instructions.choices contains true or false, which is how YAML reads yes "
                'and no; quote them: ["yes", "no"]'
            )
        return choices


class DataSpec(_Spec):
    """The run file's section `data:`, alike for every client."""

    window: int = Field(
        default=128,
        ge=1,
        description="predicted tokens per training sample; with instructions, the maximum "
        "length of a prompt with its answer",
    )
    text: str | list[Annotated[str, Field(min_length=1)]] = Field(
        default="text",
        min_length=1,
        description="field or fields that contain a record's text, joined by newlines; unused "
        "with instructions",
    )
    instructions: InstructionSpec | None = Field(
        default=None,
        description="treat records as prompts with answers, and train on the answers only; "
        "default: plain text",
    )
    fractions: Fractions = Field(
        default=Fractions(),
        description="fractions of text (or samples) set aside where no split is given",
    )
    limits: Limits = Field(
        default=Limits(),
        description="maximum size of each split in tokens (with instructions: samples)",
    )
    limits_of: dict[ClientName, ClientLimits] = Field(
        default={}, description="limits by client name; a key not given there is as in limits"
    )
    deduplicate: bool = Field(
        default=False,
        description="leave out of a client's training text what is, exactly or nearly, in its "
        "validation or test text",
    )
    public: str | None = Field(
        default=None, description="file or folder of the public set, for methods that need one"
    )

    @property
    def fields(self) -> list[str]:
        """The field or fields that hold a record's text, as a list."""
        return [self.text] if isinstance(self.text, str) else self.text

    def of(self, name: str) -> "DataSpec":
        """A client's: with limits of its own and without `limits_of`."""
        given = self.limits_of.get(name, ClientLimits()).model_dump(exclude_none=True)
        limits = self.limits.model_copy(update=given)
        return self.model_copy(update={"limits": limits, "limits_of": {}})

    @model_validator(mode="after")
    def _limits_hold_a_window(self) -> Self:
        every = [self.limits, *self.limits_of.values()] if self.instructions is None else []
        for split, limit in (pair for limits in every for pair in limits):
            if limit is not None and limit <= self.window:
                raise ValueError(
                    f"the limit of {limit} {split} tokens is too small: a window of {self.window}"
                    f" needs {self.window + 1}"
                )
        return self


Label = Annotated[str, Field(coerce_numbers_to_str=True)]
Share = Annotated[float, Field(gt=0, le=1)]


class ClientSpec(_Spec):
    """One entry of the run file's list `clients:`: a client's name and its own text files."""

    name: ClientName = Field(
        description="client name: letters, digits, dots, dashes and underscores"
    )
    path: str | None = Field(
        default=None,
        description="file or folder of .txt, .jsonl or .parquet, split by data.fractions",
    )
    train: str | None = Field(
        default=None, description="file or folder to train on, instead of path"
    )
    validation: str | None = Field(
        default=None, description="file or folder for validation; default: a fraction of train"
    )
    test: str | None = Field(
        default=None, description="file or folder for testing; default: a fraction of train"
    )

    @model_validator(mode="after")
    def _path_or_splits(self) -> Self:
        if (self.path is None) == (self.train is None):
            raise ValueError(
                f"client {self.name} needs either path (to be split) or train (splits given), "
                f"but has {'neither' if self.path is None else 'both'}"
            )
        if self.path is not None and (self.validation is not None or self.test is not None):
            raise ValueError(
                f"client {self.name} gives validation or test together with path; replace path "
                "with train"
            )
        return self


class SourceSpec(_Spec):
    """A label's source in `divide.source`, where it is a subset of a hub data set."""

    source: str = Field(description="file, folder, or hub name of a data set")
    subset: str | None = Field(default=None, description="subset (configuration) of a hub data set")


class DivideSpec(_Spec):
    """The run file's section `divide:`: one labelled data set, divided among clients."""

    source: str | dict[Label, str | SourceSpec] = Field(
        description="file, folder, or hub name of a data set; or a mapping of each label to "
        "one, or to its `source` and `subset`"
    )
    subset: str | None = Field(default=None, description="subset (configuration) of a hub data set")
    split: str = Field(default="train", description="split of a hub data set to divide")
    validation: str | None = Field(
        default=None,
        description="the data set's own validation text, dealt to clients in the shares of their "
        "training text: split of a hub data set, or file or folder; default: "
        "data.fractions.validation of what is divided",
    )
    test: str | None = Field(
        default=None,
        description="the data set's own test text, likewise; default: data.fractions.test of what "
        "is divided",
    )
    where: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression over a record's fields, such as `output | wordcount > 10`; "
        "other records are left out",
    )
    by: Literal["label", "dirichlet", "mixture", "mixtures", "even"] = Field(
        description="one label per client; Dirichlet shares; mostly one label per client; "
        "given mixtures; or equal random parts"
    )
    label: str = Field(
        default="label", description="field that contains a record's label (not used by even)"
    )
    clients: int | None = Field(
        default=None, ge=1, description="number of clients (dirichlet and even only)"
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Dirichlet concentration; larger values give more even shares (dirichlet only)",
    )
    balanced: bool = Field(
        default=False,
        description="give no further labels to clients that have their even share of the "
        "records (dirichlet only)",
    )
    share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of a client's own label in its text (mixture only)",
    )
    mixtures: dict[ClientName, dict[Label, Share]] | None = Field(
        default=None,
        description="label shares of each client, in characters (with instructions: samples) "
        "(mixtures only)",
    )
    piece: int = Field(
        default=PIECE,
        ge=20,
        description="minimum length, in characters, of the pieces that .txt files are cut "
        "into; the maximum is twice that",
    )
    held_out: Literal["own", "uniform"] = Field(
        default="own",
        description="labels of validation and test: as in the client's training text, or all "
        "labels equally (not with even)",
    )
    public: bool | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=False,
        description="the public set: with even, `true` sets aside one extra part, the size of a "
        "client's; otherwise, a fraction of what clients could hold, in the mix of all their "
        "labels",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        needed = {
            "label": (),
            "dirichlet": ("clients", "alpha"),
            "mixture": ("share",),
            "mixtures": ("mixtures",),
            "even": ("clients",),
        }[self.by]
        for option in ("clients", "alpha", "share", "mixtures"):
            given = getattr(self, option) is not None
            if given and option not in needed:
                raise ValueError(f"dividing by {self.by} does not use {option}; remove it")
            if not given and option in needed:
                raise ValueError(f"dividing by {self.by} needs {option}; set divide.{option}")
        for option, refused in (
            ("balanced", self.balanced and self.by != "dirichlet"),
            ("held_out", self.held_out != "own" and self.by == "even"),
        ):
            if refused:
                raise ValueError(f"dividing by {self.by} does not use {option}; remove it")
        if self.public is not False and (self.public is True) != (self.by == "even"):
            wanted = "true" if self.by == "even" else "a fraction, such as 0.1"
            raise ValueError(f"dividing by {self.by} needs divide.public to be {wanted}")
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
                "label, remove them, or list clients with splits of their own"
            )
        return self

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        if self.mixtures is not None and not self.mixtures:
            raise ValueError("divide.mixtures has no clients")
        for client, shares in (self.mixtures or {}).items():
            total = sum(shares.values())
            if abs(total - 1) > 1e-6:
                raise ValueError(
                    f"the shares of client {client} in divide.mixtures sum to {total:g};"
                    " make them sum to 1"
                )
        return self
