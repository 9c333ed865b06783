from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from coterie.data.division.spec import DivideSpec
from coterie.data.spec import ClientSpec, DataSpec, InstructionSpec


@pytest.mark.parametrize(
    ("model", "values", "sentence"),
    [
        (DataSpec, {"fractions": {"validation": 0.5, "test": 0.5}}, "leave no text to train on"),
        (
            DataSpec,
            {"limits": {"test": 128}},
            "128 test tokens is too small for data.window 128.*at least 129",
        ),
        (DataSpec, {"text": []}, "at least 1 item"),
        (DataSpec, {"windows": 128}, "Extra inputs"),
        (ClientSpec, {"name": "anna"}, "client anna has neither path nor train"),
        (ClientSpec, {"name": "anna", "path": "a", "train": "b"}, "has both"),
        (ClientSpec, {"name": "anna", "path": "a", "test": "b"}, "test together with path"),
        (ClientSpec, {"name": ".anna", "path": "a"}, "'.anna' must consist of 1 to 64 characters"),
        (ClientSpec, {"name": "a/b", "path": "a"}, "'a/b' must consist of"),
        (ClientSpec, {"name": "anna\n", "path": "a"}, "must consist of"),
        (ClientSpec, {"name": "a" * 65, "path": "a"}, "must consist of"),
        (DivideSpec, {"by": "dirichlet", "alpha": 1}, "dirichlet needs clients; set divide.client"),
        (DivideSpec, {"by": "dirichlet", "clients": 2}, "dirichlet needs alpha; set divide.alpha"),
        (DivideSpec, {"by": "dirichlet", "clients": 2, "alpha": 0}, "greater than 0"),
        (DivideSpec, {"by": "dirichlet", "clients": 0, "alpha": 1}, "greater than or equal to 1"),
        (DivideSpec, {"by": "mixture"}, "mixture needs share; set divide.share"),
        (DivideSpec, {"by": "mixture", "share": 1.5}, "less than or equal to 1"),
        (DivideSpec, {"by": "label", "alpha": 0.1}, "by label does not use alpha; remove it"),
        (
            DivideSpec,
            {"by": "mixture", "share": 0.5, "clients": 3},
            "by mixture does not use clients",
        ),
        (DivideSpec, {"by": "mixtures"}, "mixtures needs mixtures; set divide.mixtures"),
        (DivideSpec, {"by": "mixtures", "mixtures": {}}, "divide.mixtures has no clients"),
        (
            DivideSpec,
            {"by": "mixtures", "mixtures": {"anna": {"de": 0.7, "fr": 0.2999}}},
            "shares of client anna in divide.mixtures sum to 0.9999; they must sum to 1",
        ),
        (DivideSpec, {"by": "mixtures", "mixtures": {"anna": {}}}, "client anna .* sum to 0;"),
        (DivideSpec, {"by": "mixtures", "mixtures": {"a": {"de": 0}}}, "greater than 0"),
        (
            DivideSpec,
            {"by": "mixtures", "mixtures": {"a/b": {"de": 1}}},
            "'a/b' must consist of 1 to 64",
        ),
        (DivideSpec, {"by": "label", "source": {}}, "divide.source is empty; name a file"),
        (
            DivideSpec,
            {"by": "label", "source": {"a": "x"}, "subset": "y"},
            "give each label its own",
        ),
        (
            DivideSpec,
            {"by": "label", "balanced": True},
            "dividing by label does not use balanced; remove it",
        ),
        (
            DivideSpec,
            {"by": "label", "source": {"a": "x"}, "test": "y"},
            "divide.validation and divide.test need a single source",
        ),
        (DivideSpec, {"by": "label", "piece": 19}, "greater than or equal to 20"),
        (DataSpec, {"instructions": {"templates": "alpaca"}}, "Extra inputs"),
        (DataSpec, {"instructions": {"template": ""}}, "at least 1 character"),
        (DataSpec, {"instructions": {"choices": ["yes"]}}, "at least 2 items"),
        (DataSpec, {"instructions": {"choices": [True, False]}}, "quote them"),
        (
            DataSpec,
            {"limits": {"public": 128}},
            "128 public tokens is too small for data.window 128.*at least 129",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence(
    model: type[BaseModel], values: dict[str, Any], sentence: str
) -> None:
    source = {"source": "news.jsonl"} if model is DivideSpec else {}
    with pytest.raises(ValidationError, match=sentence):
        model.model_validate(source | values)


def test_one_text_field_or_several() -> None:
    assert DataSpec().fields == ["text"]
    assert DataSpec(text=["title", "body"]).fields == ["title", "body"]


def test_limits_on_instructions_are_of_samples_and_need_no_window() -> None:
    data = DataSpec.model_validate({"limits": {"train": 1, "test": 128}, "instructions": {}})
    assert data.instructions == InstructionSpec(template="alpaca", answer="output", choices=None)
    assert DataSpec.model_validate(data.model_dump(mode="json")) == data


def test_numbers_are_labels_too_and_shares_may_be_a_millionth_off() -> None:
    spec = DivideSpec.model_validate(
        {
            "source": {1: "a", 2: "b"},
            "by": "mixtures",
            "mixtures": {"anna": {1: 0.3, 2: 0.7 - 5e-7}},
        }
    )
    assert list(spec.source) == ["1", "2"]
    assert spec.mixtures == {"anna": {"1": 0.3, "2": 0.7 - 5e-7}}
