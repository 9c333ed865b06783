"""Fields are described by the docstrings below them, which are read only on demand."""

from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, Field, create_model

from coterie.bases import BaseSpec
from coterie.config import plugins
from coterie.config.descriptions import descriptions
from coterie.config.sections import DeploymentSpec
from coterie.data.division.spec import DivideSpec, SourceSpec
from coterie.data.spec import ClientSpec, DataSpec, InstructionSpec
from coterie.exchanges.spec import AggregationSpec, ServerOptimiserSpec
from coterie.methods.registry import kind_of
from coterie.training.spec import DPOSpec, EvaluationSpec, TrainingSpec

T = TypeVar("T")

PLUGIN = """
from typing import ClassVar

from pydantic import Field

from coterie.methods.averaging import FedProx


class Near(FedProx):
    name: ClassVar[str] = "near"
    summary: ClassVar[str] = "as fedprox"

    own: int = 1
    '''a plugin's setting'''
    other: int = Field(default=1, description="another setting")
"""


class First(BaseModel, Generic[T]):
    """A docstring that describes no field."""

    plain: int = 1
    """a plain
    field"""
    bounded: int = Field(default=1, ge=1)
    """a bounded field"""

    spelt: int = Field(default=1, description="an argument")
    bare: int = 1
    generic: T
    """a field of any type"""


class Second(First[str]):
    plain: int = 2
    bounded: int = 2
    """declared again"""
    spelt: int = Field(default=2, description="another argument")


FIRST = {"plain": "a plain field", "bounded": "a bounded field", "spelt": "an argument"}
FIRST |= {"bare": "", "generic": "a field of any type"}
SECOND = {**FIRST, "bounded": "declared again", "spelt": "another argument"}


def test_the_nearest_description_counts() -> None:
    assert descriptions(First) == descriptions(First[int]) == FIRST
    assert descriptions(Second) == SECOND


def test_a_model_made_at_run_time_has_the_descriptions_of_its_base() -> None:
    made = create_model("made", __base__=Second, plain=(int, 3), new=(int, 1))
    assert descriptions(made) == {**SECOND, "new": ""}
    prompts = descriptions(kind_of("fedprompt"))
    assert all(prompts.values())
    assert descriptions(kind_of("fedprompt-ft")) == prompts
    assert descriptions(kind_of("comigs-1g1s"))["exact"] == descriptions(kind_of("fedavg"))["exact"]


def test_a_local_class_is_described() -> None:
    class Local(BaseModel):
        field: int = 1
        """a field of a function's class"""

    assert descriptions(Local) == {"field": "a field of a function's class"}


def test_without_its_source_a_model_has_empty_descriptions() -> None:
    code = 'class Lost(BaseModel):\n    field: int = 1\n    """lost"""\n'
    scope: dict[str, Any] = {"BaseModel": BaseModel, "__name__": "nowhere"}
    exec(code, scope)
    assert descriptions(scope["Lost"]) == {"field": ""}


def test_a_plugin_s_settings_are_described(tmp_path) -> None:
    path = tmp_path / "near.py"
    path.write_text(PLUGIN, encoding="utf-8")
    (near,) = plugins.load_plugin(path)
    own = {"own": "a plugin's setting", "other": "another setting"}
    assert descriptions(near) == descriptions(kind_of("fedprox")) | own


DESCRIBED = [
    *(AggregationSpec, ServerOptimiserSpec, BaseSpec, DeploymentSpec),
    *(DataSpec, InstructionSpec, ClientSpec, DivideSpec, SourceSpec),
    *(TrainingSpec, DPOSpec, EvaluationSpec),
]


@pytest.mark.parametrize("model", DESCRIBED)
def test_every_field_is_described_and_pydantic_reads_no_source(model: type[BaseModel]) -> None:
    assert all(descriptions(model).values())
    assert not model.model_config.get("use_attribute_docstrings")
