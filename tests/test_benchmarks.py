"""The benchmarks of overhead, rounds, light clients and, on the CPU, GPUs; and `same.py`."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ports import free_port
from safetensors.torch import save_file

FOLDER = Path(__file__).parent.parent / "benchmarks"
GPU_PAGE = FOLDER.parent / "docs" / "develop" / "gpu.md"
PAIR = 8 * (2048 + 2048) + 8 * (2048 + 512)
"""Values of LoRA pairs of rank 8 on a query and a value layer of Llama-3.2-1B."""
SMALL = ["gpu.py", "--device", "cpu", "--small"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("gpu_steps", monkeypatch)


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module(name)


def test_the_overhead_of_comigs_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the values of appendix B.1 by hand: 12 layers of width 768; rank 8; 128 tokens."""
    overhead = benchmark("overhead", monkeypatch)
    with overhead.torch.device("meta"):
        base = overhead.AutoModelForCausalLM.from_config(overhead.GPT2Config())
    assert overhead.base_flops(base, 128) == 128 * (2 * 124_439_808 + 4 * 12 * 768 * 128)
    mlp, attention = 12 * 8 * 2 * (768 + 3072), 12 * 8 * (768 + 3 * 768 + 768 + 768)
    ours = overhead.overhead(base, 128, {"name": "comigs-1g1s"})
    assert (ours.router, ours.sent, ours.attention) == (12 * 2 * 768, mlp, attention)
    assert ours.flops == 2 * 128 * (2 * mlp + attention + 12 * 2 * 768)
    assert 494e6 < ours.flops < 496e6
    assert (round(2 * ours.router / 2**20, 3), round(2 * ours.sent / 2**20, 2)) == (0.035, 1.41)


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of all rows in a page's tables, without the heads."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rules = {number for number, line in enumerate(lines) if line.startswith("| ---")}
    rows = [line for n, line in enumerate(lines) if not {n, n + 1} & rules]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.thorough
def test_all_checks_of_a_gpu_run_on_a_cpu(tmp_path, monkeypatch) -> None:
    gpu = benchmark("gpu", monkeypatch)
    record, page = tmp_path / "record.json", tmp_path / "gpu.md"
    monkeypatch.setattr(sys, "argv", [*SMALL, "--json", str(record), "--out", str(page)])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the test restores it
    gpu.main()
    figures = json.loads(record.read_text())
    assert [row["contestant"] for row in figures["rows"]] == ["Coterie", "PEFT"] * 2
    assert all(row["tokens_per_second"] > 0 for row in figures["rows"])
    checks = {check["name"]: check for check in figures["checks"]}
    assert not checks.pop("fused attention, small, bf16")["works"], "a CPU has plain products"
    for name in ("two devices", "memory of `coterie base`"):
        check = checks.pop(name)
        assert (check["result"], check["works"]) == ("not run: no GPU", None)
    assert len(checks) == len(gpu.CHECKS) - 2
    assert all(check["works"] for check in checks.values()), checks
    text = page.read_text()
    assert f"Device: CPU. PyTorch: {torch.__version__}." in text
    assert len(rows_of(text)) == 4 + 1 + len(gpu.CHECKS)


def test_without_a_gpu_every_row_of_the_page_says_not_run(tmp_path, monkeypatch, capsys) -> None:
    gpu = benchmark("gpu", monkeypatch)
    page = tmp_path / "gpu.md"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(page)])
    gpu.main()
    text = page.read_text()
    rows = rows_of(text)
    assert len(rows) == 2 * 2 * 4 + 2 * 2 + len(gpu.CHECKS)
    assert all("not run" in row for row in rows)
    assert gpu.ABSENT in text
    assert gpu.ABSENT in capsys.readouterr().out
    committed = rows_of(GPU_PAGE.read_text(encoding="utf-8"))
    assert [row[0] for row in committed] == [row[0] for row in rows], "write the page again"


def test_a_check_that_fails_is_a_row(tmp_path, monkeypatch) -> None:
    checks = benchmark("gpu_checks", monkeypatch)
    place = checks.Place(tmp_path, torch.device("cpu"), tmp_path, 32)

    def fail(_: object) -> None:
        raise RuntimeError("a | b\nand more")

    failed = checks.outcome_of("resume", fail, place)
    assert (failed.result, failed.works) == ("fails: RuntimeError: a / b", False)
    assert checks.outcome_of("two", checks.divide_base, place).result == "not run: no GPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place = checks.Place(tmp_path, torch.device("cuda"), tmp_path, 32)
    assert checks.outcome_of("two", checks.divide_base, place).result == "not run: one GPU"


@pytest.mark.parametrize(("times", "works"), [(1.1, True), (2, False)])
def test_estimated_memory_is_compared_with_a_gpus_peak(times, works, tmp_path, monkeypatch) -> None:
    """Replace the run and PyTorch's figures, because no test has a GPU."""
    checks = benchmark("gpu_checks", monkeypatch)
    place = checks.Place(tmp_path, torch.device("cuda"), Path("tiny-llama"), 32)
    config = checks.parse(place.settings(checks.COMIGS, **place.large()))
    need = checks.need_of(config, "client-00", "cuda")
    monkeypatch.setattr(checks.coterie, "run", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: int(times * need.memory))
    check = checks.outcome_of("memory", checks.estimate_memory, place)
    assert check.works == works
    assert check.result.endswith(f"ratio {1 / times:.2f}")


def test_a_base_that_cannot_be_made_is_a_row(steps, tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(steps, "make_base", fail)
    rows, kernel = steps.compare_with_peft(tmp_path / "8b", "nf4", steps.SMALL, torch.device("cpu"))
    assert {row.note for row in rows} == {"fails: OSError: No space left on device"}
    assert len(rows) == 4
    assert not kernel.works


def test_a_step_that_fails_is_a_note(steps) -> None:
    def fail() -> None:
        raise NotImplementedError("no such kernel\nand more")

    functions = {"Coterie": fail, "PEFT": lambda: None}
    pair = {
        name: steps.Contestant(
            lambda s=step: steps.Steps(s, torch.nn.Identity(), 1), torch.device("cpu")
        )
        for name, step in functions.items()
    }
    kernel = steps.attention(pair["Coterie"], "1b")
    assert not kernel.works
    assert kernel.result == "fails: NotImplementedError: no such kernel"
    rows = list(steps.measured("1b", "nf4", pair, steps.SMALL))
    failed, measured, *_ = rows
    assert failed.note == "fails: NotImplementedError: no such kernel"
    assert failed.tokens_per_second is None
    assert measured.tokens_per_second > 0
    assert [steps.cells(row, rows)[-1] for row in rows] == [row.note for row in rows]


def test_a_contestants_peak_excludes_the_memory_of_the_other(steps, monkeypatch) -> None:
    """Use a GPU of 1,000 bytes, on which another contestant holds 300 and later 400 bytes."""
    now, highest = [300], [0]

    def hold(count: int, most: int) -> None:
        highest[0] = max(highest[0], now[0] + most)
        now[0] += count

    made = steps.Steps(lambda: hold(10, 50), torch.nn.Identity(), 1)

    def make() -> object:
        hold(200, 200)
        return made

    for name, answer in {
        "memory_allocated": lambda _: now[0],
        "max_memory_allocated": lambda _: highest[0],
        "reset_peak_memory_stats": lambda _: highest.__setitem__(0, now[0]),
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    contestant = steps.Contestant(make, torch.device("cuda"))
    assert contestant.held == 200
    hold(100, 100)
    assert (contestant.measure()[1], contestant.measure()[1]) == (250, 260)


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
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text("{}")
    (scores / "poet.json").write_text(json.dumps({"losses": changes.get("scores", [1.0])}))
    result = {"traffic": {"up": 5}, "seconds": changes.get("seconds", 0.1)}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_the_same_results_at_another_time_are_the_same(same, tmp_path) -> None:
    """Compare the folders of two clients of a deployed run, which have other numbers."""
    written_run(tmp_path / "old/poet-0123456789abcdef")
    written_run(tmp_path / "new/poet-fedcba9876543210", seconds=0.2, version="2")
    old, new = (same.contents(tmp_path / name) for name in ("old", "new"))
    assert (len(old), same.differences(old, new)) == (4, [])


NEXT = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
STATE, SCORES = "./checkpoints/00002/client-poet.safetensors", "./scores/trained/poet.json"


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"value": NEXT}, f"{STATE}: 1 of 3 entries differ, the first is adapter/b"),
        ({"scores": [1.5]}, f"{SCORES}: 1 of 1 entries differ, the first is losses"),
        ({"loss": 6.25}, "./metrics.jsonl: 2 of 2 entries differ"),
    ],
)
def test_a_changed_value_is_found(same, tmp_path, changes, difference) -> None:
    old = same.contents(written_run(tmp_path / "old"))
    new = same.contents(written_run(tmp_path / "new", **changes))
    [line] = same.differences(old, new)
    assert line.startswith(difference)


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


def test_a_run_that_fails_is_a_difference(same, tmp_path, monkeypatch) -> None:
    done = {"fedavg": {"seconds": 1.0, "error": "ValueError: no"}}
    monkeypatch.setattr(same, "carry_out", lambda *_: done)
    old, new = tmp_path / "old", tmp_path / "new"
    failed, unfinished = same.compare(tmp_path, "local", ["fedavg", "local"], old, new)
    assert failed.differences == ["old: ValueError: no", "new: ValueError: no"]
    assert len(unfinished.differences) == 2


@pytest.fixture
def round_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("round_cost", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["FedIT-FT", "FDLoRA", "FedAMoLE, 15 experts", "FedAMoLE, 30 experts"]
)
def test_uploads_are_the_papers_but_for_its_packing(round_cost, row) -> None:
    """Compute the size of uploads with 16 layers in bf16.

    FedAMoLE sends E k_c / C domain experts and a shared one, two routers, and the mean embeddings
    of the experts and the tokens.
    """
    method, (_, up, *_) = round_cost.LLAMA[row]
    values = PAIR
    if "experts" in method:
        held = method["experts"] * 2 / 10
        values = (held + 1) * PAIR + 2 * 8 * 2048 + 2 * 8 * (held + 1)
    expected = 16 * values * 2 / 2**20
    computed = round_cost.by_shape({"name": "fedamole", **method})
    assert computed == pytest.approx(expected)
    assert computed == pytest.approx(up, rel=0.015)
    assert computed < up


def test_work_inside_other_work_counts_once(round_cost, monkeypatch) -> None:
    ticks = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr(round_cost, "now", lambda: next(ticks))

    class Worker:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None: ...

    worker, clock = Worker(), round_cost.Clock()
    clock.time(worker, "outer", "rest")
    clock.time(worker, "inner", "train")
    worker.outer()
    assert clock.seconds == {"train": 3.0, "rest": 3.0}
