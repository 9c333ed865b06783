"""How records become pairs of answers to compare: the run file's section `data.preferences:`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PreferenceSpec(BaseModel):
    """Records have `prompt`, `chosen` and `rejected`, each a text or messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: Literal["plain", "chat"] = Field(
        default="plain",
        description="how a text prompt is read: as it is (plain), or as a user's turn through the "
        "chat template (chat); messages always go through the chat template",
    )
