"""How a run file describes its texts: what is read, and how it is split.

These models are the shape of the run file's sections `data:` and `clients:`. A value out
of range is a pydantic `ValidationError` whose message is a sentence for the user.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    field_serializer,
    field_validator,
    model_validator,
)

from coterie.data.kind import DATA_KINDS, DataKind
from coterie.data.measured import Needs
from coterie.files import ClientName

CHAT = "chat"
"""The template of prompts that are a user's turn, rendered through the chat template."""
PIECE = 2000
"""Characters of the pieces, about, into which a text file is cut before it is split."""


class Spec(BaseModel):
    """A part of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClientLimits(Spec):
    """At most so much of a client's split is kept, from its start; without a limit, all.

    A limit counts tokens, or samples where the data are instructions or conversations.
    """

    train: int | None = Field(default=None, ge=1)
    """maximum number of training tokens (with instructions: samples); default: all"""
    validation: int | None = Field(default=None, ge=1)
    """maximum number of validation tokens (or samples); default: all"""
    test: int | None = Field(default=None, ge=1)
    """maximum number of test tokens (or samples); default: all"""


class Limits(ClientLimits):
    """The limits of all clients, and of the public set."""

    public: int | None = Field(default=None, ge=1)
    """maximum number of tokens (or samples) of the public set; default: all"""


class Fractions(Spec):
    """The shares that are set aside, of a text's characters or of samples; the rest is to train."""

    validation: float = Field(default=0.1, gt=0, lt=1)
    """fraction set aside for validation"""
    test: float = Field(default=0.1, gt=0, lt=1)
    """fraction set aside for testing"""

    @model_validator(mode="after")
    def _leave_some_to_train(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"the fractions validation ({self.validation}) and test ({self.test}) leave nothing"
                " to train on; their sum must be below 1"
            )
        return self


Choice = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]


class TextSpec(DataKind):
    """Plain text, which a run file has where it names no other kind."""

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "plain text"

    fields: list[str]
    """fields that hold a record's text"""


class InstructionSpec(DataKind):
    """How records become prompts with answers: the run file's section `data.instructions:`."""

    name: ClassVar[str] = "instructions"
    summary: ClassVar[str] = "a prompt with its answer"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "answers", "choices"})

    template: str = Field(default="alpaca", min_length=1)
    """prompt template: alpaca, snli or plain; chat, for the chat template; the path of a .jinja
    file; or Jinja text over a record's fields, such as '{{ question }} Answer:'"""
    answer: str = Field(default="output", min_length=1)
    """field that contains the answer, or Jinja text that renders it"""
    choices: Annotated[list[Choice], Field(min_length=2)] | str | None = None
    """answers to choose from, for accuracy: a list, a field that contains one, or Jinja text that
    renders one per line; default: the distinct answers of a source's records with the same
    `instruction`, if there are 2 to 20"""

    @field_validator("choices", mode="before")
    @classmethod
    def _are_text(cls, choices: Any) -> Any:
        if isinstance(choices, list) and any(isinstance(choice, bool) for choice in choices):
            raise ValueError(
                "data.instructions.choices contains true or false, which is how YAML reads yes "
                'and no; quote them: ["yes", "no"]'
            )
        return choices

    @property
    def chats(self) -> bool:
        """Whether prompts are a user's turn."""
        return self.template == CHAT


class MessagesSpec(DataKind):
    """How records become conversations: the run file's section `data.messages:`."""

    name: ClassVar[str] = "messages"
    summary: ClassVar[str] = "a conversation"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "answers"})

    field: str | None = Field(default=None, min_length=1)
    """field that contains the list of turns; default: messages, else conversations"""

    @property
    def chats(self) -> bool:
        """All conversations are rendered through a chat template."""
        return True


class PreferenceSpec(DataKind):
    """How records become pairs of answers to compare: the section `data.preferences:`.

    Records have `prompt`, `chosen` and `rejected`, each a text or messages.
    """

    name: ClassVar[str] = "preferences"
    summary: ClassVar[str] = "a prompt with a chosen and a rejected answer"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "pairs"})
    compares: ClassVar[bool] = True
    referenced: ClassVar[bool] = True
    rows: ClassVar[int] = 2

    template: Literal["plain", "chat"] = "plain"
    """how a text prompt is read: as it is (plain), or as a user's turn through the chat template
    (chat); messages always go through the chat template"""

    @property
    def chats(self) -> bool:
        """Whether text prompts are a user's turn."""
        return self.template == CHAT


class KindSpec(BaseModel):
    """Key `data.kind` of a run file: a kind's name, or a mapping of `name` and its settings.

    The name is checked. The settings are checked by the kind's class.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Accept a name alone."""
        return {"name": values} if isinstance(values, str) else values

    @field_validator("name")
    @classmethod
    def _is_no_own_one(cls, name: str) -> str:
        DATA_KINDS.check(name)
        if name in DATA_KINDS.builtin:
            instead = "leave data.kind out" if name == TextSpec.name else f"set data.{name} instead"
            raise ValueError(f"{name} is one of Coterie's own kinds; {instead}")
        return name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as in the file."""
        return dict(self.model_extra or {})

    def described(self) -> dict[str, Any]:
        """Return the key as a run file would give it."""
        return {"name": self.name, **self.settings}


class DataSpec(Spec):
    """The run file's section `data:`, alike for every client."""

    window: int = Field(default=128, ge=1)
    """predicted tokens per training sample; with instructions, the maximum length of a prompt with
    its answer; with messages, of a conversation or of a part of one"""
    text: str | list[Annotated[str, Field(min_length=1)]] = Field(default="text", min_length=1)
    """field or fields that contain a record's text, joined by newlines; unused with instructions
    and messages"""
    instructions: InstructionSpec | None = None
    """treat records as prompts with answers, and train on the answers only; default: plain text"""
    messages: MessagesSpec | None = None
    """treat records as conversations, and train on what the assistant says in them; true: with the
    defaults; default: plain text"""
    preferences: PreferenceSpec | None = None
    """treat records as a prompt with a chosen and a rejected answer, and learn to prefer the chosen
    ones (see training.dpo); true: with the defaults; default: no"""
    kind: KindSpec | InstanceOf[DataKind] | None = Field(
        default=None, exclude_if=lambda kind: kind is None
    )
    """kind of data from a plugin: a name, or a mapping of `name` and its settings; default: as the
    keys above say, else plain text"""
    chat_template: str | None = Field(default=None, min_length=1)
    """path of a chat template (Jinja), or its text, for all bases; default: each base's own, else a
    plain one"""
    fractions: Fractions = Fractions()
    """fractions of text (or samples) set aside where no split is given"""
    limits: Limits = Limits()
    """maximum size of each split in tokens (with instructions: samples)"""
    limits_of: dict[ClientName, ClientLimits] = {}
    """limits by client name; a key not given there is as in limits"""
    deduplicate: bool = False
    """leave out of a client's training text what is, exactly or nearly, in its validation or test
    text"""
    special_tokens: Literal["keep", "refuse"] = "keep"
    """whether control tokens in texts, such as the end-of-text token or a chat template's markers,
    are trained as such (keep) or are an error (refuse)"""
    public: str | None = None
    """file or folder of the public set, for methods that need one"""

    @property
    def fields(self) -> list[str]:
        """The field or fields that hold a record's text, as a list."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def samples(self) -> bool:
        """Whether records are samples of their own rather than parts of one text."""
        return self.declared is not TextSpec

    @property
    def _own(self) -> DataKind:
        """The settings of the package's own kind."""
        given = self.instructions or self.messages or self.preferences
        return given or TextSpec(fields=self.fields)

    @property
    def declared(self) -> type[DataKind]:
        """The class that declares what the kind offers; it may lack the kind's reader."""
        if isinstance(self.kind, KindSpec):
            return DATA_KINDS.get(self.kind.name)
        return type(self.kind or self._own)

    @property
    def bound(self) -> DataKind:
        """The kind of data with its reader; this imports torch."""
        if isinstance(self.kind, DataKind):
            return self.kind
        name, settings = self.declared.name, self.kind.settings if self.kind else dict(self._own)
        return DATA_KINDS.get(name).model_validate(settings)

    @property
    def key(self) -> str:
        """The key that sets the kind, for errors."""
        return f"data.{self.declared.name if self.kind is None else 'kind'}"

    @property
    def chats(self) -> bool:
        """Whether records are rendered through a chat template."""
        return (self._own if self.kind is None else self.bound).chats

    def of(self, name: str) -> "DataSpec":
        """A client's: with limits of its own and without `limits_of`."""
        given = self.limits_of.get(name, ClientLimits()).model_dump(exclude_none=True)
        limits = self.limits.model_copy(update=given)
        return self.model_copy(update={"limits": limits, "limits_of": {}})

    @field_serializer("kind")
    def _described(self, kind: KindSpec | DataKind | None) -> dict[str, Any] | None:
        return None if kind is None else kind.described()

    @field_validator("messages", "preferences", mode="before")
    @classmethod
    def _are_on(cls, given: Any) -> Any:
        """`true` has the defaults, `false` none."""
        if isinstance(given, bool):
            return {} if given else None
        return given

    @model_validator(mode="after")
    def _are_of_one_kind(self) -> Self:
        kinds = {k: getattr(self, k) for k in ("instructions", "messages", "preferences", "kind")}
        given = [f"data.{kind}" for kind, spec in kinds.items() if spec is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are mutually exclusive; give one of them")
        if self.declared.compares and self.public is not None:
            raise ValueError(
                f"no method learns {self.declared.name} from a public set; remove data.public or "
                f"{self.key}"
            )
        plain = self.preferences is None and self.kind is None and not self.chats
        if self.chat_template is not None and plain:
            raise ValueError(
                "data.chat_template has no effect without conversations; set data.messages or "
                "data.instructions.template: chat, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _limits_hold_a_window(self) -> Self:
        every = [] if self.samples else [self.limits, *self.limits_of.values()]
        for split, limit in (pair for limits in every for pair in limits):
            if limit is not None and limit <= self.window:
                raise ValueError(
                    f"the limit of {limit} {split} tokens is too small: a window of {self.window}"
                    f" needs {self.window + 1}"
                )
        return self


class ClientSpec(Spec):
    """One entry of the run file's list `clients:`: a client's name and its own text files."""

    name: ClientName
    """client name: letters (a to z, A to Z), digits, dots, dashes and underscores"""
    path: str | None = None
    """file or folder of .txt, .jsonl or .parquet, split by data.fractions"""
    train: str | None = None
    """file or folder to train on, instead of path"""
    validation: str | None = None
    """file or folder for validation; default: a fraction of train"""
    test: str | None = None
    """file or folder for testing; default: a fraction of train"""

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
