"""The precision of a run that does not set it: bf16 where it is fast, and fp32 elsewhere."""

import platform
from pathlib import Path

import pytest
import torch

import coterie
from coterie.bases import precision as module
from coterie.bases.precision import SLOW_PRECISION, fast_precision
from coterie.config.run import RunConfig, parse
from coterie.deployment.terms import agreed_terms, disagreement
from coterie.messages.envelope import Order
from coterie.runs import RunFolder
from coterie.testing import loop


@pytest.mark.parametrize(
    ("available", "kernels", "chosen"),
    [(True, True, "bf16"), (True, False, "fp32"), (False, True, "fp32")],
)
def test_without_kernels_for_bf16_fp32_is_used(available, kernels, chosen, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(module, "_onednn_supports_bf16", lambda: kernels)
    assert fast_precision("cpu") == chosen


def test_processors_without_avx512_are_those_without_kernels() -> None:
    flags = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not flags.exists():
        pytest.skip("needs Linux on x86-64")
    has_kernels = {"avx512vl", "avx512bw", "avx512dq"} <= set(flags.read_text().split())
    assert fast_precision("cpu") == ("bf16" if has_kernels else "fp32")


def test_clients_and_servers_may_choose_different_precisions(values, monkeypatch) -> None:
    runs: dict[str, RunConfig] = {}
    for fast in ("bf16", "fp32"):
        monkeypatch.setattr("coterie.config.run.fast_precision", lambda _, fast=fast: fast)
        runs[fast] = parse(values(training={"steps": 1}))
    settings = runs["fp32"].visible_to("poet")
    order = Order(run="0" * 16, client="poet", kind="join", turn=0, config=settings, plugins={})
    agreed = agreed_terms(runs["bf16"], "poet")
    assert disagreement(agreed, order) is None
    more = parse(values(training={"steps": 2})).visible_to("poet")
    assert "training.steps" in str(disagreement(agreed, order.model_copy(update={"config": more})))


@pytest.mark.parametrize(
    ("available", "native", "chosen"),
    [(False, False, "bf16"), (True, False, "fp32"), (True, True, "bf16")],
)
def test_a_gpu_that_emulates_bf16_computes_in_fp32(available, native, chosen, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: native)
    assert (fast_precision("cuda"), fast_precision("mps")) == (chosen, "bf16")


@pytest.mark.parametrize("fast", ["bf16", "fp32"])
def test_a_run_without_a_precision_keeps_its_first(fast, values, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.config.run.fast_precision", lambda _: fast)
    run = parse(values(training={"steps": 1, "batch": 2}, rounds=1))
    assert run.training.precision == run.precision == fast
    done = coterie.run(run, out=tmp_path / "run")
    monkeypatch.setattr("coterie.config.run.fast_precision", lambda _: "neither")
    description = RunFolder(done.path).description
    assert description["config"]["training"]["precision"] == fast
    assert parse(description["config"]).precision == fast


def test_a_given_precision_and_stored_weights_decide(values, monkeypatch) -> None:
    monkeypatch.setattr("coterie.config.run.fast_precision", lambda _: "fp32")
    assert parse(values(training={"precision": "bf16"})).precision == "bf16"
    stored = values(training={}, bases={"poet": {"name": "tiny-gpt2", "weights": "bf16"}})
    stored["method"] = "local"
    assert (parse(stored).precision, parse(values(training={})).precision) == ("bf16", "fp32")


def test_a_client_slow_in_the_runs_precision_is_warned(config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.deployment.client.fast_precision", lambda _: "fp32")
    run = config(method="fedavg", rounds=1, training={"steps": 1, "batch": 2, "precision": "bf16"})
    workers, warnings = loop.workers(run, tmp_path), list[str]()
    for worker in workers.values():
        worker.seen = lambda event, value: warnings.extend([value] if event == "warning" else [])
    loop.server(run, tmp_path / "server", loop.Loop(workers)).rounds()
    assert warnings == [SLOW_PRECISION] * len(run.clients)
