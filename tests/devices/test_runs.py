"""Runs on the test device with various kinds of data, transforms and optimisers; model export.

The expected states are computed on the CPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DeviceTensor
from placed import PLACES, using
from small_models import write_assistant

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig, parse
from coterie.privacy import secrets
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, assert_same_states, deploy

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
NAMES = ("diarist", "poet")
QUESTIONS = {"template": "{{ instruction }}?"}
DATA: dict[str, Any] = {
    "instructions": {"data": {"instructions": QUESTIONS}, "evaluation": {"generate": 3}},
    "choices": {"data": {"instructions": {**QUESTIONS, "choices": ["yes", "no"]}}},
    "conversations": {"data": {"messages": True}, "evaluation": {"generate": 3}},
    "conversations, replay": {
        "data": {"messages": True},
        "training": {
            "replay": {"start": 0, "text": [{"request": "Why?"}, {"text": "It rains."}]},
        },
    },
    "conversations, gate": {"data": {"messages": True}},
    "preferences": {"data": {"preferences": True}},
    "preferences, released": {
        "data": {"preferences": True},
        "training": {"dpo": {"reference": "base", "label_smoothing": 0.1}},
    },
}
DROPPING = {"name": "comigs-1g1s", "lora": {"dropout": 0.1}}


TRAINING: dict[str, Any] = {
    "dropout, pieces": {
        "method": {**DROPPING, "router": {"every": 2, "steps": 1}},
        "training": {"micro_batch": 1, "base_dropout": 0.1},
    },
    "checkpointing": {
        "method": DROPPING,
        "training": {"checkpointing": True, "base_dropout": 0.1},
    },
    "stored activations, clipping": {
        "training": {"store_activations": True, "max_grad_norm": 0.1, "sampling": "epochs"}
    },
    "sgd": {"training": {"optimiser": {"name": "sgd", "momentum": 0.9}}},
    "fedadam": {"aggregation": {"optimiser": "fedadam"}},
    "token weights": {"aggregation": {"weights": "tokens"}},
    "median": {"aggregation": {"transforms": ["median"]}},
    "noise": {"aggregation": {"transforms": [{"name": "clipped_gaussian", "epsilon": 1e4}]}},
    "int8": {"aggregation": {"transforms": ["int8"]}},
    "masks": {"aggregation": {"transforms": ["masked_sum"]}, "deployment": {"quorum": 3}},
}


NOT_ON_TWO = {"checkpointing", "stored activations, clipping"}
"""Runs that two test devices cannot execute, because PyTorch sees one device.

Layers are recomputed in a thread that PyTorch ends, and gradients are not clipped on each device.
"""


@pytest.fixture(autouse=True)
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the seed of noise and keys, which otherwise differ from run to run."""
    monkeypatch.setattr(secrets, "draw", lambda: bytes(secrets.KEY_BYTES))
    for file in sorted(EXAMPLES.glob("*.py")):
        load_plugin(file)


@pytest.fixture
def make(values, questions, talks, opinions) -> Callable[[str], RunConfig]:
    """A function that returns a run of DATA or TRAINING."""

    def run(name: str) -> RunConfig:
        changes = dict((DATA | TRAINING)[name])
        training = {"steps": 2, "batch": 2, "precision": "fp32"} | changes.pop("training", {})
        whole = {"method": "comigs-1g1s", "rounds": 2, "training": training}
        if name in DATA:
            folder = talks if "conv" in name else opinions if "pref" in name else questions
            limits = {"train": 12, "validation": 3, "test": 3}
            data = {"window": 40, "limits": limits} | changes.pop("data")
            clients = [{"name": client, "path": f"{client}.jsonl"} for client in NAMES]
            whole |= {"data": data, "data_root": str(folder), "clients": clients}
        if "gate" in name:
            whole["base"] = write_assistant(talks.parent / "assistant")
        return parse(values(**whole | changes))

    return run


@pytest.mark.parametrize("name", [*DATA, *TRAINING])
@pytest.mark.parametrize(
    "place",
    [p if p == "one device" else pytest.param(p, marks=pytest.mark.slow) for p in PLACES],
)
def test_a_run_ends_with_the_bits_of_the_cpu(name, place, make, tmp_path, monkeypatch) -> None:
    if place == "two devices" and name in NOT_ON_TWO:
        pytest.skip("PyTorch sees the two test devices as one device")
    config = make(name)
    expected = RunFolder(coterie.run(config, out=tmp_path / "cpu").path)
    with using(monkeypatch, float64=place != "mps"):
        run = config.model_copy(update={"device": PLACES[place]})
        folder = RunFolder(coterie.run(run, out=tmp_path / "run").path)
    assert_same_states(folder, expected)
    assert folder.outcome is not None
    assert expected.outcome is not None
    assert folder.outcome["trained"] == expected.outcome["trained"]
    assert folder.outcome.get("drift") == expected.outcome.get("drift")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversations", "preferences", "noise", "int8", "fedadam"])
def test_a_deployment_ends_with_the_bits_of_the_cpu(name, make, tmp_path, monkeypatch) -> None:
    config = make(name)
    expected = RunFolder(coterie.run(config, out=tmp_path / "cpu").path)
    with using(monkeypatch):
        run = config.model_copy(update={"device": "cuda"})
        deploy(run, tmp_path)
        assert_as_local(run, tmp_path, expected)


def test_bf16_autocast_gives_the_losses_of_the_cpu(make, tmp_path, monkeypatch) -> None:
    """Compare losses alone: in bf16, the CPU uses another implementation of attention."""
    config = make("sgd")
    training = config.training.model_copy(update={"precision": "bf16"})
    config = config.model_copy(update={"training": training})
    expected = coterie.run(config, out=tmp_path / "cpu").results["comigs-1g1s"]["trained"]
    with using(monkeypatch):
        run = config.model_copy(update={"device": "cuda"})
        actual = coterie.run(run, out=tmp_path / "run").results["comigs-1g1s"]["trained"]
    for client, scores in expected.items():
        assert actual[client]["loss"] == pytest.approx(scores["loss"], rel=1e-3)


def test_a_model_is_loaded_generates_and_is_exported(values, bases, tmp_path, gpu) -> None:
    base = str(bases / "llama")
    run = coterie.run(parse(values(base=base, device=gpu, rounds=2)), out=tmp_path / "run")
    model: Any = coterie.load(run.path, "poet")
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    written = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert isinstance(written, DeviceTensor)
    assert written.shape == (1, 7)
    exported = coterie.export(run.path, "poet", tmp_path / "out")
    assert (exported.path / "model.safetensors").exists()
