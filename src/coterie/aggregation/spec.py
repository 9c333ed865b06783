"""How uploads become one, as a run file describes it."""

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from coterie.aggregation.registry import TRANSFORMS

UNUSED = {"fedavgm": ("beta2", "tau"), "fedadagrad": ("beta2",)}
"""Settings that do nothing in some optimisers."""


class ServerOptimiserSpec(BaseModel):
    """Key `aggregation.optimiser` of a run file: a name, or a mapping of `name` and settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["fedavgm", "fedadam", "fedyogi", "fedadagrad"]
    """optimiser: momentum, Adam, Yogi or Adagrad on the server"""
    learning_rate: float | None = Field(default=None, gt=0)
    """server learning rate (eta); default: 1 with fedavgm, 0.01 with the others"""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """decay of the mean of updates (beta, beta_1)"""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """decay of the mean of squared updates (beta_2; fedadam and fedyogi only)"""
    tau: float = Field(default=1e-3, gt=0)
    """degree of adaptivity (tau; not with fedavgm)"""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """A name alone is a mapping, too."""
        return {"name": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _acts(self) -> Self:
        for key in UNUSED.get(self.name, ()):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with {self.name}; remove it")
        return self

    @property
    def rate(self) -> float:
        """The learning rate, whether given or not."""
        return self.learning_rate or (1.0 if self.name == "fedavgm" else 0.01)


class TransformSpec(BaseModel):
    """An entry of `aggregation.transforms`: a name, or a mapping of `name` and settings.

    The name is checked. The settings are checked by the transform's class.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    """name of the transform"""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Accept a name alone."""
        return {"name": values} if isinstance(values, str) else values

    @model_validator(mode="wrap")
    @classmethod
    def _object(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Any:
        """Accept a transform of the Python API as it is: its class has checked its settings."""
        return values if isinstance(values, BaseModel) else validate(values)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        TRANSFORMS.check(name)
        return name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as in the file."""
        return dict(self.model_extra or {})

    def described(self) -> dict[str, Any]:
        """Return the entry as a run file would give it."""
        return {"name": self.name, **self.settings}


class BoundsSpec(BaseModel):
    """Keys that bound uploads, each by a multiple of the round's median."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    largest_change: float | None = Field(default=3.0, ge=1)
    """largest change of an upload's parameters since the download, as a multiple of the round's
    median; larger ones are excluded from the round, or scaled down if they are half of all; null:
    unlimited"""
    largest_norm: float | None = Field(default=10.0, ge=1)
    """largest norm of an upload's other numbers (predictions, embeddings), as a multiple of the
    round's median; null: unlimited"""
    largest_weight: float | None = Field(default=100.0, ge=1)
    """largest weight of a client, as a multiple of the round's median, with `weights: tokens`;
    null: unlimited"""


class AggregationSpec(BoundsSpec):
    """Section `aggregation` of a run file: how uploads become one."""

    weights: Literal["uniform", "tokens"] = "uniform"
    """weights of clients in means: equal, or by training tokens"""
    transforms: tuple[TransformSpec, ...] = ()
    """transforms of uploads, downloads and means, in the order in which they encode: names, or
    mappings of `name` and settings"""
    optimiser: ServerOptimiserSpec | None = None
    """optimiser with which the server steps towards a round's mean: a name, or a mapping; default:
    the mean replaces the server's parameters"""

    @field_serializer("transforms")
    def _described(self, transforms: tuple[TransformSpec, ...]) -> list[dict[str, Any]]:
        return [transform.described() for transform in transforms]
