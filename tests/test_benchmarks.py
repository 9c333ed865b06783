"""The benchmark of overhead, that of GPUs on the CPU, and what compares two commits' results."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ports import free_port
from safetensors.torch import save_file

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALL = ["gpu.py", "--device", "cpu", "--small", "--weights", "bf16", "--no-compile"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("gpu", monkeypatch)


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_overhead_of_comigs_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix B.1, counted by hand: GPT-2 has 12 layers of width 768; rank 8; 128 tokens."""
    overhead = benchmark("overhead", monkeypatch)
    with overhead.torch.device("meta"):
        base = overhead.AutoModelForCausalLM.from_config(overhead.GPT2Config())
    assert overhead.base_flops(base, 128) == 128 * (2 * 124_439_808 + 4 * 12 * 768 * 128)
    mlp, attention = 12 * 8 * 2 * (768 + 3072), 12 * 8 * (768 + 3 * 768 + 768 + 768)
    ours = overhead.overhead(base, 128, {"name": "comigs-1g1s"})
    assert (ours.router, ours.sent, ours.attention) == (12 * 2 * 768, mlp, attention)
    assert ours.flops == 2 * 128 * (2 * mlp + attention + 12 * 2 * 768)
    assert 494e6 < ours.flops < 496e6
    assert round(2 * ours.router / 2**20, 3) == 0.035
    assert round(2 * ours.sent / 2**20, 2) == 1.41


@pytest.mark.thorough
def test_it_measures_on_a_cpu_too(gpu, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [*SMALL, "--json", str(tmp_path / "found.json")])
    gpu.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["who"] for row in found["rows"]] == ["Coterie", "PEFT"]
    assert all(row["tokens_per_second"] > 0 and not row["note"] for row in found["rows"])
    works = {check["what"]: check["works"] for check in found["checks"]}
    fused = works.pop("fused attention, small, bf16")
    assert not fused, "a short window on a CPU has plain products"
    assert len(works) == 4
    assert all(works.values())
    assert "small, bf16" in capsys.readouterr().out


def test_a_step_that_fails_is_a_note(gpu) -> None:
    def fail() -> None:
        raise NotImplementedError("no such kernel\nand more")

    cpu = gpu.torch.device("cpu")
    steps = {"Coterie": fail, "PEFT": lambda: None}
    pair = {
        name: gpu.Contestant(lambda s=step: gpu.Steps(s, gpu.nn.Identity(), 1), cpu)
        for name, step in steps.items()
    }
    kernel = gpu.attention(pair["Coterie"], "1b")
    assert not kernel.works
    assert kernel.found == "fails: NotImplementedError: no such kernel"
    failed, took = gpu.measured("1b", "nf4", pair, gpu.SMALL, False)
    assert failed.note == "fails: NotImplementedError: no such kernel"
    assert failed.tokens_per_second is None
    assert took.tokens_per_second > 0
    gpu.show_all([failed, took], [], gpu.SMALL, "CPU")


def test_a_peak_is_a_contestant_s_own(gpu, monkeypatch) -> None:
    """A GPU of 1,000 bytes, of which another holds 300."""
    now, highest = [300], [0]

    def hold(count: int, most: int) -> None:
        highest[0] = max(highest[0], now[0] + most)
        now[0] += count

    made = gpu.Steps(lambda: hold(10, 50), gpu.nn.Identity(), 1)

    def make() -> object:
        hold(200, 200)
        return made

    for name, answer in {
        "memory_allocated": lambda _: now[0],
        "max_memory_allocated": lambda _: highest[0],
        "reset_peak_memory_stats": lambda _: highest.__setitem__(0, now[0]),
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(gpu.torch.cuda, name, answer)
    one = gpu.Contestant(make, gpu.torch.device("cuda"))
    assert one.held == 200
    hold(100, 100)  # another's
    assert one.turn()[1] == 250
    assert one.turn()[1] == 260


@pytest.mark.slow
def test_a_deployment_of_light_clients_is_measured(monkeypatch, capsys) -> None:
    pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
    deployment = benchmark("deployment", monkeypatch)
    cost = deployment.deploy(3, rounds=3, port=free_port(), light=True)
    assert 2_300_000 < cost.upload < 2_500_000
    assert all(seconds > 0 for seconds in cost.phases.values())
    assert sum(cost.phases.values()) < cost.round == cost.overhead
    assert 0 < cost.idle <= cost.server
    assert cost.worker > 0
    assert cost.processes == 1
    deployment.show_costs([cost], cost.worker)
    assert "3 light" in capsys.readouterr().out


@pytest.fixture
def same(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("same", monkeypatch)


def written_run(folder: Path, value: float = 1.0, **changes: Any) -> Path:
    """Write what `same.py` reads of a run folder."""
    checkpoint, scores = folder / "checkpoints/00002", folder / "scores/trained"
    checkpoint.mkdir(parents=True)
    scores.mkdir(parents=True)
    header = {"coterie": json.dumps({"coterie": changes.get("version", "1"), "values": {}})}
    state = {"adapter/a": torch.ones(3), "adapter/b": torch.tensor([2.0, value])}
    save_file(state, checkpoint / "client-poet.safetensors", header)
    lines = [
        {"round": 0, "client": "poet", "name": "loss/joint", "value": changes.get("loss", 6.5)},
        {"round": 0, "client": None, "name": "seconds", "value": changes.get("seconds", 0.1)},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "run.json").write_text("{}")
    (scores / "poet.json").write_text(json.dumps({"losses": changes.get("scores", [1.0])}))
    result = {"traffic": {"up": 5}, "seconds": changes.get("seconds", 0.1)}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_the_same_results_at_another_time_are_the_same(same, tmp_path) -> None:
    old = same.contents(written_run(tmp_path / "old"))
    new = same.contents(written_run(tmp_path / "new", seconds=0.2, version="2"))
    assert len(old) == 4
    assert same.differences(old, new) == []


def next_float() -> float:
    return float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"value": next_float()},
            "./checkpoints/00002/client-poet.safetensors: "
            "1 of 3 entries differ, the first is adapter/b",
        ),
        (
            {"scores": [1.5]},
            "./scores/trained/poet.json: 1 of 1 entries differ, the first is losses",
        ),
    ],
)
def test_a_changed_value_is_found(same, tmp_path, changes, difference) -> None:
    """The smallest change of a tensor is that of its last bit."""
    old = same.contents(written_run(tmp_path / "old"))
    new = same.contents(written_run(tmp_path / "new", **changes))
    assert same.differences(old, new) == [difference]


def test_a_changed_metric_is_found(same, tmp_path) -> None:
    old = same.contents(written_run(tmp_path / "old"))
    [found] = same.differences(old, same.contents(written_run(tmp_path / "new", loss=6.25)))
    assert found.startswith("./metrics.jsonl: 2 of 2 entries differ")


@pytest.mark.parametrize(
    "file", ["result.json", "checkpoints/00002/client-poet.safetensors", "metrics.jsonl"]
)
def test_a_missing_file_is_found(same, tmp_path, file) -> None:
    old = same.contents(written_run(tmp_path / "old"))
    (written_run(tmp_path / "new") / file).unlink()
    assert same.differences(old, same.contents(tmp_path / "new")) == [f"./{file} is missing in new"]
    assert same.differences(same.contents(tmp_path / "new"), old) == [f"./{file} is missing in old"]


def test_two_runs_without_files_are_not_the_same(same, tmp_path) -> None:
    assert same.differences(same.contents(tmp_path), same.contents(tmp_path))


def test_a_deployed_run_is_compared_without_its_number(same, tmp_path) -> None:
    old = same.contents(written_run(tmp_path / "old/small-poet-01234567").parent)
    new = same.contents(written_run(tmp_path / "new/small-poet-89abcdef").parent)
    assert len(old) == 4
    assert same.differences(old, new) == []


def test_a_run_that_fails_is_a_difference(same, tmp_path, monkeypatch) -> None:
    """Even if it fails in the same way with both commits, as nothing is compared then."""
    monkeypatch.setattr(
        same, "carry_out", lambda *_: {"fedavg": {"seconds": 1.0, "error": "ValueError: no"}}
    )
    old, new = tmp_path / "old", tmp_path / "new"
    failed, unfinished = same.compare(tmp_path, "local", ["fedavg", "local"], old, new)
    assert failed.differences == ["old: ValueError: no", "new: ValueError: no"]
    assert len(unfinished.differences) == 2
