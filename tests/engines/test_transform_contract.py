"""The built-in transforms and the examples keep the contract, and faulty transforms do not."""

import inspect
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, PrivateAttr

from coterie.config.plugins import load_plugin
from coterie.messages import Groups
from coterie.testing import TransformContract
from coterie.testing.small import small_run
from coterie.transforms.contract import Context, Transform, mapped
from coterie.transforms.reductions import Median
from coterie.transforms.registry import TRANSFORMS

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
KINDS = {file.stem: load_plugin(file)[0] for file in sorted(EXAMPLES.glob("*.py"))}


class TestInt8(TransformContract):
    transform = KINDS["int8"]()


class TestMaskedSum(TransformContract):
    transform = KINDS["masked_sum"]()


class TestGaussian(TransformContract):
    transform = KINDS["gaussian"](epsilon=1e4)


class TestMedian(TransformContract):
    transform = Median()


class TestInt8WithTokensAndServerOptimiser(TransformContract):
    transform = KINDS["int8"]()
    changes: ClassVar = {
        "aggregation": {"transforms": [transform], "weights": "tokens", "optimiser": "fedadam"}
    }


class InPlace(Transform):
    """A transform that modifies its argument."""

    name: ClassVar[str] = "in_place"
    summary: ClassVar[str] = "updates are halved in place"

    def encode(self, update: Groups, context: Context) -> Groups:
        return mapped(update, lambda tensor: tensor.mul_(0.5))


class Forgetful(Transform):
    """A transform whose state is not in its memory."""

    name: ClassVar[str] = "forgetful"
    summary: ClassVar[str] = "updates shrink with every call"
    _calls: int = PrivateAttr(0)

    def encode(self, update: Groups, context: Context) -> Groups:
        self._calls += 1
        return mapped(update, lambda tensor: tensor / self._calls)


class Secretive(Transform):
    """A transform that leaves a setting out of run files."""

    name: ClassVar[str] = "secretive"
    summary: ClassVar[str] = "updates are scaled"
    factor: float = Field(default=1.0, exclude=True, description="factor of updates")

    def encode(self, update: Groups, context: Context) -> Groups:
        return mapped(update, lambda tensor: tensor * self.factor)


@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (InPlace(), "test_no_tensor_is_modified_in_place"),
        (Forgetful(), "test_a_stopped_run_continues_to_the_same_bits"),
        (Forgetful(), "test_the_order_of_clients_does_not_matter"),
        (Forgetful(), "test_lost_replies_do_not_change_the_result"),
        (Secretive(factor=0.5), "test_a_run_file_contains_all_settings"),
    ],
)
def test_a_faulty_transform_fails(faulty: Transform, test: str, tmp_path, monkeypatch) -> None:
    contract = TransformContract()
    monkeypatch.setattr(TransformContract, "transform", faulty, raising=False)
    TRANSFORMS.register(type(faulty))
    (folder := tmp_path / "texts").mkdir()
    run = small_run(
        folder, method="fedavg", aggregation={"transforms": [faulty], "largest_change": None}
    )
    arguments = {"run": run, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = inspect.signature(getattr(contract, test)).parameters
    with pytest.raises(AssertionError):
        getattr(contract, test)(**{name: arguments[name] for name in wanted})
