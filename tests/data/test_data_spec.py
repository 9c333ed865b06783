"""Sections of run files with their defaults."""

from coterie.data.division.spec import DivideSpec
from coterie.data.spec import DataSpec, InstructionSpec, Limits, MessagesSpec, PreferenceSpec


def test_one_text_field_or_several() -> None:
    assert DataSpec().fields == ["text"]
    assert DataSpec(text=["title", "body"]).fields == ["title", "body"]


def test_limits_on_instructions_are_of_samples_and_need_no_window() -> None:
    data = DataSpec.model_validate({"limits": {"train": 1, "test": 128}, "instructions": {}})
    assert data.instructions == InstructionSpec(template="alpaca", answer="output", choices=None)
    assert DataSpec.model_validate(data.model_dump(mode="json")) == data


def test_messages_and_preferences_are_on_or_off() -> None:
    for kind, section in (("messages", MessagesSpec()), ("preferences", PreferenceSpec())):
        for value, wanted in ((True, section), ({}, section), (False, None)):
            assert getattr(DataSpec.model_validate({kind: value}), kind) == wanted
    assert DataSpec(messages=MessagesSpec(), limits=Limits(train=1)).limits.train == 1


def test_numbers_are_labels_too_and_shares_may_be_a_millionth_off() -> None:
    mixtures = {"anna": {1: 0.3, 2: 0.7 - 5e-7}}
    values = {"source": {1: "a", 2: "b"}, "by": "mixtures", "mixtures": mixtures}
    spec = DivideSpec.model_validate(values)
    assert list(spec.source) == ["1", "2"]
    assert spec.mixtures == {"anna": {"1": 0.3, "2": 0.7 - 5e-7}}
