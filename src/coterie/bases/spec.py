"""The specification of a base in a run file: its name, weight format, revision and adapter.

This module does not import torch.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, model_serializer, model_validator

Weights = Literal["fp32", "bf16", "int8", "nf4"]


class BaseSpec(BaseModel, frozen=True, extra="forbid"):
    """A base in a run file: a name, or a mapping of the keys below."""

    name: str
    """base model: a built-in base, a local folder, a GGUF file, or a name on the Hugging Face hub;
    `base: NAME` is short for this key alone"""
    weights: Weights | None = None
    """format of the base's weights in memory (int8 and nf4 are quantised); default: the
    checkpoint's format"""
    revision: str | None = None
    """branch, tag or commit of a base on the hub; default: the latest commit"""
    adapter: str | None = None
    """folder of an existing LoRA adapter in PEFT's format, which is merged into the base's weights
    when the base is loaded; `adapter: FOLDER` beside `base` is short for this key"""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Replace a base's plain name, such as "gpt2", by a mapping with the key `name`."""
        if isinstance(values, str):
            return {"name": values}
        if not isinstance(values, Mapping | BaseSpec):
            raise ValueError(
                "give a name, or a mapping with the key `name` and, optionally, `weights`, "
                "`revision` and `adapter`"
            )
        return values

    @model_serializer
    def _short(self) -> str | dict[str, str]:
        """Serialise a base as a plain name if no other key is set."""
        values = {key: value for key, value in dict(self).items() if value is not None}
        return self.name if values.keys() == {"name"} else values

    def __str__(self) -> str:
        """Format the base as a phrase for messages, such as "gpt2 in bf16 at revision main"."""
        format = f" in {self.weights}" if self.weights else ""
        revision = f" at revision {self.revision}" if self.revision else ""
        adapter = f" with the adapter {self.adapter}" if self.adapter else ""
        return f"{self.name}{format}{revision}{adapter}"

    @property
    def quantised(self) -> bool:
        """Whether the weights of linear layers have fewer than 16 bits."""
        return self.weights in ("int8", "nf4")
