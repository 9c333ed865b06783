"""Section `aggregation` of a run file."""

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from coterie.registry import NamedSpec, Section
from coterie.transforms.registry import TRANSFORMS

UNUSED = {"fedavgm": ("beta2", "tau"), "fedadagrad": ("beta2",)}
"""A mapping from the name of each optimiser to the settings that have no effect with it."""


class ServerOptimiserSpec(Section):
    """Key `aggregation.optimiser` of a run file.

    The value is a name, or a mapping with the key `name` and the optimiser's settings.
    """

    name: Literal["fedavgm", "fedadam", "fedyogi", "fedadagrad"]
    """server optimiser: momentum (fedavgm), Adam, Yogi or Adagrad"""
    learning_rate: float | None = Field(default=None, gt=0)
    """server learning rate (eta); default: 1 for fedavgm, 0.01 for the other optimisers"""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """decay rate of the first moment (beta in fedavgm, beta_1 in the other optimisers)"""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """decay rate of the second moment (beta_2; fedadam and fedyogi only)"""
    tau: float = Field(default=1e-3, gt=0)
    """constant that is added to the root of the second moment (tau; not for fedavgm)"""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        for key in UNUSED.get(self.name, ()):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with {self.name}; remove it")
        return self

    @property
    def rate(self) -> float:
        """The learning rate: `learning_rate`, or the optimiser's default."""
        return self.learning_rate or (1.0 if self.name == "fedavgm" else 0.01)


class TransformSpec(NamedSpec):
    """An entry of `aggregation.transforms` in a run file.

    The entry is a name, or a mapping with the key `name` and the transform's settings. Only the
    name is validated here. The transform's class validates the settings.
    """

    name: str
    """name of a built-in, registered or plugin transform"""

    @model_validator(mode="wrap")
    @classmethod
    def _accept_transform(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Any:
        # The class of a transform passed to the Python API has validated its settings.
        return values if isinstance(values, BaseModel) else validate(values)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        TRANSFORMS.check(name)
        return name


class AggregationSpec(Section):
    """Section `aggregation` of a run file."""

    largest_change: float | None = Field(default=3.0, ge=1)
    """largest norm of the change of a client's shared parameters in a round, as a multiple of the
    round's median or of the client's last change, whichever is larger, and two thirds of this for
    changes that point against the others'; uploads with larger changes are excluded, or scaled down
    if exactly half of the uploads have larger changes; null: unlimited"""
    largest_norm: float | None = Field(default=10.0, ge=1)
    """largest norm of the other tensors of an upload (predictions, embeddings), as a multiple of
    the round's median; null: unlimited"""
    largest_weight: float | None = Field(default=100.0, ge=1)
    """largest weight of a client, as a multiple of the round's median (`weights: tokens` only);
    null: unlimited"""
    weights: Literal["uniform", "tokens"] = "uniform"
    """weights of clients in the mean: equal weights, or the clients' numbers of training tokens"""
    least_others: int = Field(default=1, ge=1)
    """fewest other clients whose uploads a client can receive in a mean; a mean of fewer clients
    is not computed; 1: no limit, so each of two clients can compute the other's upload from their
    mean"""
    transforms: tuple[TransformSpec, ...] = ()
    """transforms of uploads, downloads and means, in encoding order; each entry is a name, or a
    mapping with the key `name` and the transform's settings"""
    optimiser: ServerOptimiserSpec | None = None
    """server optimiser: a name, or a mapping with the key `name` and the optimiser's settings;
    default: no optimiser (the mean replaces the server's parameters)"""

    @field_serializer("transforms")
    def _serialise(self, transforms: tuple[TransformSpec, ...]) -> list[dict[str, Any]]:
        return [transform.described() for transform in transforms]
