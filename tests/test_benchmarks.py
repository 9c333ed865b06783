"""The benchmarks of overhead, and of GPUs, which has none here: on the CPU, on a tiny base."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    gpu.show([failed, took], [], gpu.SMALL, "CPU")


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
