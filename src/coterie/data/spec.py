"""The run file's sections `data:` and `clients:`, which describe texts and their splits.

An invalid value raises a pydantic `ValidationError` whose message is a sentence for the user.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    InstanceOf,
    field_serializer,
    field_validator,
    model_validator,
)

from coterie.data.kind import DATA_KINDS, DataKind
from coterie.data.measured import Needs
from coterie.names import ClientName
from coterie.registry import NamedSpec, Section

CHAT = "chat"
"""The name of the prompt template that renders a prompt as a user's turn of a conversation."""
PIECE = 2000
"""The minimum length, in characters, of the pieces of a text file that are assigned to splits."""


class ClientLimits(Section):
    """The maximum size of each of a client's splits.

    A limit is a number of tokens for plain text, or a number of samples for other kinds of data. If
    a split exceeds the limit, the end of the split is left out.
    """

    train: int | None = Field(default=None, ge=1)
    """maximum number of training tokens (with instructions: samples); default: all"""
    validation: int | None = Field(default=None, ge=1)
    """maximum number of validation tokens (or samples); default: all"""
    test: int | None = Field(default=None, ge=1)
    """maximum number of test tokens (or samples); default: all"""


class Limits(ClientLimits):
    """The maximum sizes of all clients' splits, and of the public set."""

    public: int | None = Field(default=None, ge=1)
    """maximum number of tokens (or samples) of the public set; default: all"""


class Fractions(Section):
    """The fractions of the data that are set aside for validation and for test.

    They are fractions of the number of characters for plain text, and of the number of samples for
    other kinds of data.
    """

    validation: float = Field(default=0.1, gt=0, lt=1)
    """fraction set aside for validation"""
    test: float = Field(default=0.1, gt=0, lt=1)
    """fraction set aside for testing"""

    @model_validator(mode="after")
    def _leave_some_to_train(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"the fractions validation ({self.validation}) and test ({self.test}) leave no "
                "text to train on; their sum must be below 1"
            )
        return self


Choice = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]


class TextSpec(DataKind):
    """Settings of plain text, the default kind of data."""

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "plain text"

    fields: list[str]
    """fields that hold a record's text"""


class InstructionSpec(DataKind):
    """Settings of prompts with answers: the run file's section `data.instructions:`."""

    name: ClassVar[str] = "instructions"
    summary: ClassVar[str] = "a prompt with its answer"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "answers", "choices"})

    template: str = Field(default="alpaca", min_length=1)
    """prompt template: alpaca, snli or plain; chat, which renders prompts through the chat
    template; the path of a .jinja file; or Jinja text over a record's fields, such as
    '{{ question }} Answer:'"""
    answer: str = Field(default="output", min_length=1)
    """field that contains the answer, or Jinja text that renders it"""
    choices: Annotated[list[Choice], Field(min_length=2)] | str | None = None
    """answers to choose from, for accuracy: a list, a field that contains a list, or Jinja text
    that renders one answer per line; default: the distinct answers of a source's records with the
    same `instruction`, if there are 2 to 20"""

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
        return self.template == CHAT


class MessagesSpec(DataKind):
    """Settings of conversations: the run file's section `data.messages:`."""

    name: ClassVar[str] = "messages"
    summary: ClassVar[str] = "a conversation"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "answers"})

    field: str | None = Field(default=None, min_length=1)
    """field that contains the list of turns; default: messages, or else conversations"""

    @property
    def chats(self) -> bool:
        return True


class PreferenceSpec(DataKind):
    """Settings of pairs of answers: the run file's section `data.preferences:`.

    Records have the fields `prompt`, `chosen` and `rejected`, each of which is a string
    or a list of messages.
    """

    name: ClassVar[str] = "preferences"
    summary: ClassVar[str] = "a prompt with a chosen and a rejected answer"
    offers: ClassVar[frozenset[Needs]] = frozenset({"nothing", "pairs"})
    compares: ClassVar[bool] = True
    referenced: ClassVar[bool] = True
    rows: ClassVar[int] = 2

    template: Literal["plain", "chat"] = "plain"
    """rendering of a text prompt: unchanged (plain), or as a user's turn through the chat template
    (chat); messages are always rendered through the chat template"""

    @property
    def chats(self) -> bool:
        return self.template == CHAT


class KindSpec(NamedSpec):
    """The run file's key `data.kind`, which selects a kind of data that is not built in.

    The value is the name of the kind of data, or a mapping with `name` and settings. This class
    validates the name. The class of the kind of data validates the settings.
    """

    @field_validator("name")
    @classmethod
    def _is_no_own_one(cls, name: str) -> str:
        DATA_KINDS.check(name)
        if name in DATA_KINDS.builtin:
            remedy = "leave data.kind out" if name == TextSpec.name else f"set data.{name} instead"
            raise ValueError(f"{name} is a built-in kind; {remedy}")
        return name


class DataSpec(Section):
    """The run file's section `data:`, which applies to all clients."""

    window: int = Field(default=128, ge=1)
    """predicted tokens per training sample; with instructions, the maximum length of a prompt with
    its answer; with messages, the maximum length of a conversation, or of each sample into which a
    longer conversation is cut"""
    text: str | list[Annotated[str, Field(min_length=1)]] = Field(default="text", min_length=1)
    """field or fields that contain a record's text, joined by newlines; unused with instructions
    and messages"""
    instructions: InstructionSpec | None = None
    """treat records as prompts with answers, and train on the answers only; default: plain text"""
    messages: MessagesSpec | None = None
    """treat records as conversations, and train on the assistant's answers only; `true` selects
    the default settings; default: plain text"""
    preferences: PreferenceSpec | None = None
    """treat records as prompts with a chosen and a rejected answer, and learn to prefer the chosen
    answers (see training.dpo); `true` selects the default settings; default: plain
    text"""
    kind: KindSpec | InstanceOf[DataKind] | None = Field(
        default=None, exclude_if=lambda kind: kind is None
    )
    """kind of data from a plugin: a name, or a mapping with `name` and settings; default: the
    kind selected by instructions, messages or preferences, or else plain text"""
    chat_template: str | None = Field(default=None, min_length=1)
    """path or Jinja text of a chat template that is used for all bases; default: each base's own
    template, or else Coterie's"""
    fractions: Fractions = Fractions()
    """fractions of text (or samples) set aside for each validation or test split without data of
    its own"""
    limits: Limits = Limits()
    """maximum size of each split in tokens (with instructions: samples)"""
    limits_of: dict[ClientName, ClientLimits] = Field(default={})
    """maximum sizes for individual clients, by client name; a limit that is left out has the
    value in data.limits"""
    validation_for_training: float = Field(default=0.0, ge=0, lt=1)
    """fraction of the validation samples that are added to the training text instead, for fair
    comparisons with methods that learn from validation text in other ways"""
    deduplicate: bool = False
    """exclude training texts that are exact or near duplicates of the client's validation or test
    texts"""
    special_tokens: Literal["keep", "refuse"] = "keep"
    """treatment of control tokens in texts, such as the end-of-text token or a chat template's
    markers: train on them as control tokens (keep), or report an error (refuse)"""
    public: str | None = None
    """file or folder of the public set, for methods that need one"""

    @property
    def fields(self) -> list[str]:
        """The list of the fields that contain a record's text."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def samples(self) -> bool:
        """Whether records are separate samples rather than parts of one text."""
        return self.declared is not TextSpec

    @property
    def _own(self) -> DataKind:
        """The settings of the selected built-in kind of data. The default is plain text."""
        settings = self.instructions or self.messages or self.preferences
        return settings or TextSpec(fields=self.fields)

    @property
    def declared(self) -> type[DataKind]:
        """The class that declares the properties of the selected kind of data as class variables.

        An example of a class variable is `compares`, which tells whether the loss compares answers.
        For a built-in kind, the declaring class is the class of the kind's settings, such as
        `PreferenceSpec`. The settings' class can be imported without torch, and a subclass of it in
        `data/kinds/` reads and encodes the records. For any other kind, the declaring class itself
        reads and encodes the records.
        """
        if isinstance(self.kind, KindSpec):
            return DATA_KINDS.get(self.kind.name)
        return type(self.kind or self._own)

    @property
    def bound(self) -> DataKind:
        """An object of the selected kind of data, created with the settings in this section.

        The object can read and encode records. Access to this property imports torch, which is
        slow.
        """
        if isinstance(self.kind, DataKind):
            return self.kind
        name, settings = self.declared.name, self.kind.settings if self.kind else dict(self._own)
        return DATA_KINDS.get(name).model_validate(settings)

    @property
    def key(self) -> str:
        """The key of the run file that selects the kind of data. Error messages name this key."""
        return f"data.{self.declared.name if self.kind is None else 'kind'}"

    @property
    def chats(self) -> bool:
        """Whether this kind of data formats its records with a chat template."""
        return (self._own if self.kind is None else self.bound).chats

    def of(self, name: str) -> "DataSpec":
        """Return the section for one client, with that client's limits under the key `limits`."""
        client_limits = self.limits_of.get(name, ClientLimits()).model_dump(exclude_none=True)
        limits = self.limits.model_copy(update=client_limits)
        return self.model_copy(update={"limits": limits, "limits_of": {}})

    @field_serializer("kind")
    def _described(self, kind: KindSpec | DataKind | None) -> dict[str, Any] | None:
        return None if kind is None else kind.described()

    @field_validator("messages", "preferences", mode="before")
    @classmethod
    def _are_on(cls, given: Any) -> Any:
        """Convert a boolean value of `data.messages` or `data.preferences`.

        The value `true` becomes an empty mapping, which selects the kind's default settings. The
        value `false` becomes None, as if the key were missing.
        """
        if isinstance(given, bool):
            return {} if given else None
        return given

    @model_validator(mode="after")
    def _are_of_one_kind(self) -> Self:
        kinds = {k: getattr(self, k) for k in ("instructions", "messages", "preferences", "kind")}
        keys = [f"data.{kind}" for kind, spec in kinds.items() if spec is not None]
        if len(keys) > 1:
            raise ValueError(f"{' and '.join(keys)} are mutually exclusive; set only one of them")
        if self.declared.compares and self.public is not None:
            raise ValueError(
                f"no method can learn {self.declared.name} from a public set; remove data.public "
                f"or {self.key}"
            )
        plain = self.preferences is None and self.kind is None and not self.chats
        if self.chat_template is not None and plain:
            raise ValueError(
                "data.chat_template has no effect without conversations; remove it, or set "
                "data.messages, or set data.instructions.template to chat"
            )
        return self

    @model_validator(mode="after")
    def _limits_hold_a_window(self) -> Self:
        all_limits = [] if self.samples else [self.limits, *self.limits_of.values()]
        for split, limit in (pair for limits in all_limits for pair in limits):
            if limit is not None and limit <= self.window:
                raise ValueError(
                    f"the limit of {limit} {split} tokens is too small for data.window "
                    f"{self.window}; set it to at least {self.window + 1}"
                )
        return self


class ClientSpec(Section):
    """An entry of the run file's list `clients:`, with a client's name and text files."""

    name: ClientName
    """client name: letters (a to z, A to Z), digits, dots, dashes and underscores; two names must
    not differ only in case, and names of devices on Windows, such as aux, are refused"""
    path: str | None = None
    """file or folder of .txt, .jsonl or .parquet files, to be split by data.fractions"""
    train: str | None = None
    """file or folder of the training text, instead of path"""
    validation: str | None = None
    """file or folder of the validation text; default: a fraction of train"""
    test: str | None = None
    """file or folder of the test text; default: a fraction of train"""

    @model_validator(mode="after")
    def _path_or_splits(self) -> Self:
        if (self.path is None) == (self.train is None):
            problem = "neither path nor train" if self.path is None else "both path and train"
            raise ValueError(
                f"client {self.name} has {problem}; set either path (a text that Coterie splits) "
                "or train (a training text)"
            )
        if self.path is not None and (self.validation is not None or self.test is not None):
            raise ValueError(
                f"client {self.name} has validation or test together with path; rename path to "
                "train"
            )
        return self
