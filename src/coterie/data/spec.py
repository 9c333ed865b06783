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


class Limits(_Spec):
    """At most so much of a split is kept, from its start; without a limit, all.

    A limit counts tokens, or samples where the data are instructions.
    """

    train: int | None = Field(
        default=None, ge=1, description="Training tokens (of instructions: samples) kept at most."
    )
    validation: int | None = Field(
        default=None, ge=1, description="Validation tokens (or samples) kept at most."
    )
    test: int | None = Field(
        default=None, ge=1, description="Test tokens (or samples) kept at most."
    )
    public: int | None = Field(
        default=None, ge=1, description="Tokens (or samples) of the public text kept at most."
    )


class Fractions(_Spec):
    """The shares that are set aside, of a text's characters or of samples; the rest is to train."""

    validation: float = Field(
        default=0.1, gt=0, lt=1, description="Share set aside for validation."
    )
    test: float = Field(default=0.1, gt=0, lt=1, description="Share set aside for testing.")

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
        description="The prompt: alpaca, snli or plain; Jinja text over a record's fields, such as"
        " '{{ question }} Answer:'; or a .jinja file.",
    )
    answer: str = Field(
        default="output",
        min_length=1,
        description="Field of a record that holds the answer, or Jinja text that makes it.",
    )
    choices: Annotated[list[Choice], Field(min_length=2)] | str | None = Field(
        default=None,
        description="Answers to choose from, for accuracy: a list, or the field that holds it, or"
        " Jinja text that makes one a line;"
        " without it, the 2 to 20 answers of a source's records with the same `instruction`.",
    )

    @field_validator("choices", mode="before")
    @classmethod
    def _are_text(cls, choices: Any) -> Any:
        if isinstance(choices, list) and any(isinstance(choice, bool) for choice in choices):
            raise ValueError(
                "data.instructions.choices holds true or false, which is how YAML reads yes and no;"
                ' put them in quotes: ["yes", "no"]'
            )
        return choices


class DataSpec(_Spec):
    """The run file's section `data:`, alike for every client."""

    window: int = Field(
        default=128,
        ge=1,
        description="Tokens that a training sample predicts; of instructions, the most tokens that"
        " a prompt with its answer may have.",
    )
    text: str | list[Annotated[str, Field(min_length=1)]] = Field(
        default="text",
        min_length=1,
        description="Field(s) of a record that hold its text; several are joined by newline."
        " Unused with instructions.",
    )
    instructions: InstructionSpec | None = Field(
        default=None,
        description="Records are prompts with answers, and only the answers are learnt.",
    )
    fractions: Fractions = Field(
        default=Fractions(),
        description="Shares of a text, or of samples, set aside where splits are not given.",
    )
    limits: Limits = Field(
        default=Limits(), description="Tokens (of instructions: samples) of each split at most."
    )
    public: str | None = Field(
        default=None, description="File or folder that everybody may see, for methods that need it."
    )

    @property
    def fields(self) -> list[str]:
        """The field or fields that hold a record's text, as a list."""
        return [self.text] if isinstance(self.text, str) else self.text

    @model_validator(mode="after")
    def _limits_hold_a_window(self) -> Self:
        for split, limit in self.limits if self.instructions is None else ():
            if limit is not None and limit <= self.window:
                raise ValueError(
                    f"the limit of {limit} {split} tokens is too small: a window of {self.window}"
                    f" needs {self.window + 1}"
                )
        return self


def _plain(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            f"the name {name!r} must be 1 to 64 letters, digits, dots, dashes and underscores,"
            " and not start with a dot or dash"
        )
    return name


ClientName = Annotated[str, AfterValidator(_plain)]
Label = Annotated[str, Field(coerce_numbers_to_str=True)]
Share = Annotated[float, Field(gt=0, le=1)]


class ClientSpec(_Spec):
    """One entry of the run file's list `clients:`: a client's name and its own text files."""

    name: ClientName = Field(
        description="The client's name: letters, digits, dots, dashes, underscores."
    )
    path: str | None = Field(
        default=None,
        description="File or folder of .txt, .jsonl or .parquet, split by data.fractions.",
    )
    train: str | None = Field(
        default=None, description="File or folder to train on, instead of path."
    )
    validation: str | None = Field(
        default=None, description="File or folder for validation; without it, a fraction of train."
    )
    test: str | None = Field(
        default=None, description="File or folder for testing; without it, a fraction of train."
    )

    @model_validator(mode="after")
    def _path_or_splits(self) -> Self:
        if (self.path is None) == (self.train is None):
            raise ValueError(
                f"client {self.name} needs either path (to be split) or train (splits given),"
                f" and {'has neither' if self.path is None else 'cannot have both'}"
            )
        if self.path is not None and (self.validation is not None or self.test is not None):
            raise ValueError(
                f"client {self.name} gives validation or test beside path; say train instead of"
                " path where splits are given"
            )
        return self


class SourceSpec(_Spec):
    """A label's source in `divide.source`, where it is a subset of a hub data set."""

    source: str = Field(description="File, folder, or hub name of a data set.")
    subset: str | None = Field(default=None, description="Its subset (configuration) on the hub.")


class DivideSpec(_Spec):
    """The run file's section `divide:`: one labelled data set, divided among clients."""

    source: str | dict[Label, str | SourceSpec] = Field(
        description="File, folder, or hub name of a data set; or a mapping of each label to one,"
        " or to its `source` and `subset`."
    )
    subset: str | None = Field(
        default=None, description="Subset (configuration) of a hub data set."
    )
    split: str = Field(default="train", description="Split of a hub data set that is read.")
    by: Literal["label", "dirichlet", "mixture", "mixtures", "even"] = Field(
        description="One label per client; Dirichlet shares; mostly one label per client; the"
        " mixtures given; or equal parts at random."
    )
    label: str = Field(
        default="label", description="Field of a record that holds its label (unused with even)."
    )
    clients: int | None = Field(
        default=None, ge=1, description="Number of clients (dirichlet and even only)."
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Evenness of the shares (dirichlet only).",
    )
    balanced: bool = Field(
        default=False,
        description="A client that has its even part of the records gets none of the labels that"
        " follow (dirichlet only).",
    )
    share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of a client's own label in its text (mixture only).",
    )
    mixtures: dict[ClientName, dict[Label, Share]] | None = Field(
        default=None,
        description="Each client's labels and their shares of its characters, or samples (mixtures"
        " only).",
    )
    piece: int = Field(
        default=PIECE,
        ge=20,
        description="Characters, up to twice as many, of the pieces that a label's .txt files are"
        " cut into.",
    )
    held_out: Literal["own", "uniform"] = Field(
        default="own",
        description="Validation and test: as the client's training text, or of all labels (not with"
        " even).",
    )
    public: bool = Field(
        default=False,
        description="One part more, as large as a client's, is what everybody may see (even only).",
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
                raise ValueError(f"dividing by {self.by} takes no {option}; leave it out")
            if not given and option in needed:
                raise ValueError(f"dividing by {self.by} needs {option}; set divide.{option}")
        for option, refused in (
            ("balanced", self.balanced and self.by != "dirichlet"),
            ("public", self.public and self.by != "even"),
            ("held_out", self.held_out != "own" and self.by == "even"),
        ):
            if refused:
                raise ValueError(f"dividing by {self.by} takes no {option}; leave it out")
        return self

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if not self.source:
            raise ValueError("divide.source is empty; name a file, a folder or a hub data set")
        if not isinstance(self.source, str) and self.subset is not None:
            raise ValueError(
                "divide.subset goes with one source; give it beside the source of its label"
            )
        return self

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        if self.mixtures is not None and not self.mixtures:
            raise ValueError("divide.mixtures names no client")
        for client, shares in (self.mixtures or {}).items():
            total = sum(shares.values())
            if abs(total - 1) > 1e-6:
                raise ValueError(
                    f"the shares of client {client} in divide.mixtures sum to {total:g};"
                    " make them sum to 1"
                )
        return self
