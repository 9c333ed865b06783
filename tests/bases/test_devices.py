"""The devices of bases: refusals, and layers that are spread over several GPUs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

import coterie
from coterie import CoterieError
from coterie.adapters import Adapter, Layout, detach, of_roles
from coterie.bases import BaseSpec, load_base, load_skeleton
from coterie.bases.devices import devices_of, names_of, placement
from coterie.cli.deploy import validate_texts
from coterie.config.run import parse
from coterie.inference.finished import recorded
from coterie.losses.tokens import Batch, language_model_loss, logits_in_pieces, token_losses
from coterie.runs import RunFolder

CLIENTS = {"clients": [{"name": "poet", "path": "poet.txt"}]}
IDS = torch.arange(3, 67).view(2, 32)
GPUS = [torch.device(f"cuda:{n}") for n in range(3)]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps", ["cuda:0", "cuda:1"]])
def test_a_device_is_no_part_of_a_run_s_identity(device) -> None:
    values = {**CLIENTS, "training": {"precision": "fp32"}}  # unset, it follows the device
    run, plain = parse({**values, "device": device}), parse(values)
    assert (run.as_dict()["device"], parse(run.as_dict())) == (device, run)
    assert run.digest() == plain.digest()
    assert "device" not in run.visible_to("poet")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 0, [], ["cuda:0"], ["cuda:1"] * 2, "cpu:1"])
def test_what_is_no_device_is_said_in_a_sentence(device) -> None:
    with pytest.raises(CoterieError, match=r"^device(: give auto, cpu, cuda| should be)"):
        parse({**CLIENTS, "device": device})


@pytest.mark.parametrize(
    ("count", "gpus"), [(0, "no CUDA GPU"), (1, "only 1 CUDA GPU"), (2, "only 2 CUDA GPUs")]
)
def test_the_error_for_a_missing_device_counts_the_gpus(count, gpus, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    fault = f"'cuda:3' is not available: PyTorch finds {gpus} on this machine; set `device`"
    with pytest.raises(CoterieError, match=fault):
        devices_of(("cuda:0", "cuda:3") if count else "cuda:3")
    assert (names_of("auto"), names_of("cpu")) == ("cuda" if count else "cpu", "cpu")
    if count == 2:
        assert names_of(("cuda:1", "cuda:0")) == "cuda:1, cuda:0"
        assert names_of("cuda:1") == "cuda:1"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("count", [2, 3])
def test_layers_are_spread_in_their_order(bases, family, count) -> None:
    skeleton = load_skeleton(str(bases / family))
    devices = GPUS[::-1][:count]
    places = placement(skeleton, devices)
    assert set(places.values()) <= set(devices)
    assert len(set(places.values())) > 1

    def device(name: str) -> torch.device:
        return places[max((path for path in places if f"{name}.".startswith(f"{path}.")), key=len)]

    turns = [devices.index(device(name)) for name, _ in skeleton.named_parameters()]
    assert turns[0] == 0
    layers = [t for t, (n, _) in zip(turns, skeleton.named_parameters(), strict=True) if ".1." in n]
    assert len(set(layers)) == 1, "a layer is not split"
    assert turns == sorted(turns)


def result(base: Any) -> list[torch.Tensor]:
    """Return the loss, gradients, losses by token and logits of a step with an adapter."""
    adapter = Adapter(base.model, Layout(), 0, "ada", lambda _: True)
    model = adapter.attach(base.model)
    adapter.require_grad(of_roles("generalist", "specialist", "dense", "router"))
    loss = language_model_loss(model, IDS)
    loss.backward()
    pieces = list(logits_in_pieces(model, Batch(IDS)))
    grads = [p.grad for p in adapter.tensors().values() if p.grad is not None]
    results = [loss.detach(), *grads, token_losses(model, IDS), *pieces]
    detach(base.model)
    return results


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_spread_base_computes_the_same_bits(bases, family) -> None:
    # All parts are on the CPU, but have the hooks that move tensors from part to part.
    plain, spread = (load_base(str(bases / family), "fp32", 32) for _ in range(2))
    skeleton = load_skeleton(str(bases / family))
    places: dict[str, Any] = dict.fromkeys(placement(skeleton, GPUS), "cpu")
    assert len(places) > 2
    dispatch_model(spread.model, places, force_hooks=True)
    assert len([module for module in spread.model.modules() if hasattr(module, "_hf_hook")]) > 2
    actual, expected = result(spread), result(plain)
    assert len(actual) == len(expected) > 3
    assert all(map(torch.equal, actual, expected))


def test_a_run_of_another_machine_s_device_is_used_on_this_one(config, tmp_path) -> None:
    done = coterie.run(config(rounds=1, method="fedit"), out=tmp_path / "run")
    described = json.loads((done.path / "run.json").read_text())
    described["config"]["device"] = "cuda:7"
    (done.path / "run.json").write_text(json.dumps(described))
    assert recorded(RunFolder(done.path)).device == "auto"
    assert coterie.load(done.path, "poet").device.type in ("cpu", "cuda")


@pytest.fixture
def gpus(monkeypatch) -> Any:
    """A function that sets the memory of this machine's GPUs in bytes; no weights can be read."""

    def have(*sizes: int) -> None:
        def memory(device: torch.device) -> tuple[int, int]:
            return sizes[device.index or 0] // 2, sizes[device.index or 0]

        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)

    def read(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("coterie.bases.loading.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr("coterie.bases.weights._check_bitsandbytes", lambda base: None)
    return have


READ = "The GPU has too little memory for the base"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("weights", "linear", "others"),
    [("fp32", 4, 4), ("bf16", 2, 2), ("int8", 1, 2), ("nf4", 0.5, 2)],
)
def test_a_base_larger_than_gpus_is_refused(weights, linear, others, count, bases, gpus) -> None:
    base = BaseSpec(name=str(bases / "llama"), weights=weights)
    size = 0.0
    skeleton = load_skeleton(base.name)
    for name, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers()):
        size += tensor.numel() * (linear if "_proj" in name else others)
    device, first = ("cuda:0", "cuda:1")[:count], int(size) // 3 * (count - 1)
    for missing, reason in [(0, READ), (1, "for its weights, but the memory of cuda:0")]:
        gpus(*[int(size) - first - missing, first][:count])
        with pytest.raises(CoterieError, match=reason):
            load_base(base, "bf16", 16, device=device)


def test_the_error_states_both_numbers_and_what_helps(bases, monkeypatch, gpus) -> None:
    name = str(bases / "llama")
    gpus(10_000)
    monkeypatch.setattr(torch.nn.Parameter, "numel", lambda self: 10**8)
    count = len(list(load_skeleton(name).parameters()))
    with pytest.raises(CoterieError) as error:
        load_base(BaseSpec(name=name, weights="bf16"), "bf16", 16, device="cuda:0")
    assert str(error.value) == (
        f"The base {name} in bf16 needs at least {count / 5:.1f} GB for its weights, but the "
        "memory of cuda:0 has 0.0 GB, of which 0.0 GB are free; set base.weights: nf4, `base` to "
        "a smaller one, or `device` to more or larger GPUs."
    )


def test_main_memory_counts_only_on_a_mac_s_gpu(bases, monkeypatch, gpus) -> None:
    name = str(bases / "gpt2")
    size = sum(p.numel() for p in load_skeleton(name).parameters()) * 4
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for limit, device, reason in [
        (size, "mps", READ),
        (size - 1, "mps", r"for its weights, but the memory of mps has"),
        (size - 1, "cpu", READ),  # the file is mapped into memory
    ]:
        monkeypatch.setattr("coterie.bases.devices.main_memory", lambda limit=limit: limit)
        with pytest.raises(CoterieError, match=reason):
            load_base(name, "fp32", 16, device=device)


def copy(base: Path, folder: Path, dtype: str | None) -> None:
    """Copy a base whose configuration states another format, or none."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))


def test_two_bytes_are_certain_if_the_configuration_states_no_format(bases, tmp_path, gpus) -> None:
    copy(bases / "gpt2", tmp_path, None)
    size = sum(p.numel() for p in load_skeleton(str(tmp_path)).parameters()) * 2
    for free, reason in [(size, READ), (size - 1, "for its weights, but the memory of cuda")]:
        gpus(free)
        with pytest.raises(CoterieError, match=reason):
            load_base(str(tmp_path), "bf16", 16, device="cuda")


def test_float64_is_refused_on_a_mac_s_gpu(bases, tmp_path, monkeypatch, gpus) -> None:
    copy(bases / "gpt2", tmp_path, "float64")
    fp32 = BaseSpec(name=str(tmp_path), weights="fp32")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(CoterieError, match=r"is stored in float64, .* set base.weights: fp32, or"):
        load_base(str(tmp_path), "bf16", 16, device="mps")
    cases: list[Any] = [(fp32, "bf16"), (str(tmp_path), "fp32")]
    for base, precision in cases:
        with pytest.raises(CoterieError, match=READ):
            load_base(base, precision, 16, device="mps")


def test_a_missing_device_is_reported_before_anything_is_read(values, monkeypatch) -> None:
    monkeypatch.setattr("coterie.bases.loading.load_tokenizer", None)
    monkeypatch.setattr("coterie.engines.session.gathered", None)
    with pytest.raises(CoterieError, match="The device 'cuda:7' is not available"):
        coterie.run(parse(values(device="cuda:7")))
    with pytest.raises(CoterieError, match="The device 'cuda:7' is not available"):
        validate_texts("poet", {"path": "poet.txt", "train": None}, "cuda:7")
