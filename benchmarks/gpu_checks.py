"""Checks of the features that must work on a GPU, through Coterie's public interfaces.

Each check executes runs, and returns its result and whether this is the expected result. Most runs
train a small base that ships with Coterie. `outcome_of` executes a check; an exception becomes the
check's result.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from common import MIB
from memory import make_texts
from torch import Tensor
from typer.testing import CliRunner

import coterie
from coterie.analysis.need import need_of
from coterie.cli import app
from coterie.config.run import parse
from coterie.messages.names import LOSS, TRUST
from coterie.runs import Callback, RunFolder

ASSETS = Path(coterie.__file__).parent / "assets"
COMIGS = {"name": "comigs-1g1s", "router": {"every": 2, "steps": 1}}
PCL = (
    {"name": "pcl-1"},
    {"name": "pcl-2", "validation_batches": 1},
    {"name": "pcl-3", "public_batches": 1},
)
TOLERANCE = 1e-4
"""Maximum relative difference between the losses of one run on different devices, in fp32."""
ESTIMATE = 0.75, 1.33
"""Minimum and maximum ratio of the estimated peak memory to the measured peak memory."""
NOT_RUN, FAILS = "not run", "fails:"
Result = tuple[str, bool]
"""The result of a check, and whether it is the expected result."""


@dataclass(frozen=True)
class Check:
    """A feature that must work on the device, with the result of its check."""

    name: str
    result: str = NOT_RUN
    works: bool | None = None
    """None if the check was not run."""


class NotRunError(Exception):
    """A check cannot be run on this machine, for the reason in the message."""


@dataclass(frozen=True)
class Place:
    """The device that is checked, and a folder for texts and runs."""

    folder: Path
    device: torch.device
    base: Path
    """The base for the checks whose results depend on the size of the base."""
    window: int
    """The window of runs on this base, in tokens."""

    def new_run(self) -> Path:
        """Return a path for a new run folder."""
        return Path(mkdtemp(dir=self.folder)) / "run"

    def settings(self, method: Mapping[str, Any], count: int = 2, **changes: Any) -> dict[str, Any]:
        """Return the content of a run file with `count` clients, whose texts are random words."""
        return {
            "base": "tiny-llama",
            "device": str(self.device),
            "method": method,
            "rounds": 2,
            "data_root": str(self.folder),
            "clients": make_texts(self.folder, count),
            "data": {"window": 32, "limits": {"train": 4000, "validation": 600, "test": 300}},
            "training": {"steps": 2, "batch": 2, "precision": "bf16"},
            "evaluation": {"keep": "last"},
            **changes,
        }

    def large(self) -> dict[str, Any]:
        """Return the settings of runs on `base`."""
        limits = {"train": 4000, "validation": 1200, "test": 600}
        return {"base": str(self.base), "data": {"window": self.window, "limits": limits}}

    def run(self, method: Mapping[str, Any], count: int = 2, **changes: Any) -> coterie.Run:
        """Execute a run in a new folder."""
        return coterie.run(self.settings(method, count, **changes), out=self.new_run())


def outcome_of(name: str, check: Callable[[Place], Result], place: Place) -> Check:
    """Execute a check, and release the memory that it leaves on the device."""
    try:
        return Check(name, *check(place))
    except NotRunError as reason:
        return Check(name, f"{NOT_RUN}: {reason}")
    except Exception as error:  # one check must not end the benchmark
        return Check(name, failure(error), works=False)
    finally:
        release_memory()


def release_memory() -> None:
    """Release the memory of models that are no longer used."""
    gc.collect()  # models have circular references
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def failure(error: Exception) -> str:
    """Describe an error in one line, for a cell of a table."""
    message = str(error).strip() or "no message"
    return f"{FAILS} {type(error).__name__}: {message.splitlines()[0]:.60}".replace("|", "/")


def scores_of(run: coterie.Run) -> list[Mapping[str, float]]:
    """Return the scores of each client's model."""
    result = run.results[run.config.label]
    return list(result[result["reports"]].values())


def perplexities_of(run: coterie.Run) -> Result:
    """Format the mean of the clients' perplexities, and return whether the mean is finite."""
    values = [scores["perplexity"] for scores in scores_of(run)]
    mean = sum(values) / len(values)
    return f"mean perplexity {mean:,.0f}", math.isfinite(mean)


def train(place: Place) -> Result:
    """Train and evaluate CoMiGS-1G1S, and generate tokens with a client's model."""
    run = place.run(COMIGS)
    perplexity, finite = perplexities_of(run)
    model: Any = run.model("client-00")
    prompt = torch.tensor([[0, 1, 2, 3]], device=model.device)
    ids = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    generated = f"{ids.shape[1] - 4} tokens on {ids.device}"
    return f"{perplexity}; {generated}", finite and ids.device.type == place.device.type


def run_in_fp32(place: Place, device: str | list[str]) -> coterie.Run:
    """Execute a run whose losses can be compared with the losses on another device."""
    training = {"steps": 4, "batch": 2, "precision": "fp32"}
    return place.run(COMIGS, device=device, training=training)


def compare_losses(run: coterie.Run, other: coterie.Run) -> Result:
    """Compare the training losses of two runs with `TOLERANCE`."""
    pairs = list(zip(losses_of(run), losses_of(other), strict=True))
    differences = [abs(loss - reference) / reference for loss, reference in pairs]
    figures = f"{max(differences):.1e} (tolerance {TOLERANCE:.0e})"
    close = all(difference <= TOLERANCE for difference in differences)  # false for NaN
    return f"{len(pairs)} losses differ by at most {figures}", close


def losses_of(run: coterie.Run) -> list[float]:
    """Return all training losses of a run, in nats per token."""
    lines = RunFolder(run.path).metrics()
    return [line["value"] for line in lines if line["name"].startswith(LOSS)]


def agree_with_cpu(place: Place) -> Result:
    """Compare a run's losses with the losses of the same run on the CPU."""
    return compare_losses(run_in_fp32(place, str(place.device)), run_in_fp32(place, "cpu"))


def divide_base(place: Place) -> Result:
    """Compare a run on two GPUs with the same run on one of them.

    Raises:
        NotRunError: The benchmark runs on the CPU, or the machine has only one GPU.
    """
    if place.device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotRunError("one GPU" if place.device.type == "cuda" else "no GPU")
    run = run_in_fp32(place, ["cuda:0", "cuda:1"])
    difference, close = compare_losses(run, run_in_fp32(place, "cuda:0"))
    devices = sorted({str(p.device) for p in run.model("client-00").parameters()})
    return f"{difference}; on {', '.join(devices)}", close and devices == ["cuda:0", "cuda:1"]


def find_peers(place: Place) -> Result:
    """Run `auto` with a trial and router phases.

    In a run of four rounds, a trial follows the first round. Clients receive means with their new
    weights before the third round, and log the weights.
    """
    method = {"name": "auto", "router": COMIGS["router"], "samples": 4}
    run = place.run(method, count=3, rounds=4)
    trusts = trust_metrics(run)
    phases = sum(line["name"] == f"{LOSS}routers" for line in RunFolder(run.path).metrics())
    perplexity, finite = perplexities_of(run)
    result = f"{len(trusts)} trust metrics, {phases} router phases, {perplexity}"
    return result, finite and phases > 0 and all_trust(run, trusts)


def exchange_updates(place: Place, method: Mapping[str, Any]) -> Result:
    """Run a variant of PCL with eight clients and two exchanges."""
    settings = place.settings({**method, "mlp": None, "warmup": 1, "every": 1}, count=8)
    if method["name"] == "pcl-3":
        settings["data"]["public"] = make_texts(place.folder, 9)[-1]["path"]
    run = coterie.run(settings, out=place.new_run())
    trusts = trust_metrics(run)
    perplexity, finite = perplexities_of(run)
    complete = all(len(weights) == 8 for _, weights in trusts)
    works = finite and complete and all_trust(run, trusts)
    return f"{len(trusts)} trust metrics, {perplexity}", works


def trust_metrics(run: coterie.Run) -> list[tuple[str, Mapping[str, float]]]:
    """Return the logged trust weights, as pairs of a client and its weights of all clients."""
    lines = RunFolder(run.path).metrics()
    return [(line["client"], line["value"]) for line in lines if line["name"] == TRUST]


def all_trust(run: coterie.Run, trusts: Sequence[tuple[str, Mapping[str, float]]]) -> bool:
    """Return whether every client has logged trust weights, and all sums of weights are 1."""
    sums = [sum(weights.values()) for _, weights in trusts]
    clients = {client.name for client in run.config.clients}
    return clients == {client for client, _ in trusts} and all(
        math.isclose(total, 1, abs_tol=1e-4) for total in sums
    )


def converse(place: Place) -> Result:
    """Train on conversations with a chat template, and ask `coterie chat` a question."""
    run = place.run(
        COMIGS,
        base="tiny-gpt2",
        data_root=str(ASSETS / "four-assistants"),
        clients=[{"name": name, "path": f"{name}.jsonl"} for name in ("anna", "ben")],
        data={
            "window": 160,
            "messages": {},
            "chat_template": str(ASSETS / "assistants" / "chat.jinja"),
            "limits": {"train": 8, "validation": 4, "test": 2},
        },
        evaluation={"generate": 8},
    )
    command = ["chat", str(run.path), "--client", "anna", "--temperature", "0", "--tokens", "20"]
    question = "Where can I read about the sea?\n"
    answer = CliRunner().invoke(app, command, input=question, catch_exceptions=False).stdout
    perplexity, finite = perplexities_of(run)
    scored = all("rouge_l" in scores for scores in scores_of(run))
    return f"{perplexity}; an answer of {len(answer.split())} words", bool(
        finite and scored and answer.strip()
    )


class StoppedError(Exception):
    """A callback has stopped a run."""


class StopAfterFirstRound(Callback):
    """A callback that stops a run as Ctrl-C does."""

    def on_round_end(self, round: int, scores: str) -> None:
        raise StoppedError


def resume(place: Place) -> Result:
    """Compare the states of a run that was stopped and resumed with those of a complete run."""
    settings, resumed = place.settings(COMIGS, **place.large()), place.new_run()
    complete = coterie.run(settings, out=place.new_run())
    with suppress(StoppedError):
        coterie.run(settings, out=resumed, callbacks=[StopAfterFirstRound()])
    assert RunFolder(resumed).result is None, "the run was not stopped"
    coterie.resume(resumed)
    states, expected = tensors_of(resumed), tensors_of(complete.path)
    assert states.keys() == expected.keys(), "the states have different tensors"
    if all(torch.equal(states[key], expected[key]) for key in expected):
        return "same bits", True
    largest = max((states[key] - expected[key]).abs().max().item() for key in expected)
    return f"values differ by up to {largest:.1e}", False


def tensors_of(folder: Path) -> dict[tuple[object, ...], Tensor]:
    """Return all tensors in the clients' states: adapters, buffers and moments."""
    return {
        (client, part, group, name): tensor
        for client in ("client-client-00", "client-client-01")
        for part, state in RunFolder(folder).load(client).walk()
        for group, tensors in state.groups.items()
        for name, tensor in tensors.items()
    }


def resume_deterministically(place: Place) -> Result:
    """Execute `resume` with PyTorch's deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        return resume(place)
    finally:
        torch.use_deterministic_algorithms(False)


def estimate_memory(place: Place) -> Result:
    """Compare the memory that `coterie base` estimates for a client with PyTorch's peak.

    Raises:
        NotRunError: The benchmark runs on the CPU; `need.py` measures the memory there.
    """
    if place.device.type != "cuda":
        raise NotRunError("no GPU")
    settings = place.settings(COMIGS, count=1, **place.large())
    need = need_of(parse(settings), "client-00", "cuda")
    assert need is not None, "there is no estimate for this run"
    torch.cuda.reset_peak_memory_stats(place.device)
    coterie.run(settings, out=place.new_run())
    measured = torch.cuda.max_memory_allocated(place.device)
    ratio = need.memory / measured
    figures = f"estimate {need.memory / MIB:,.0f} MiB, measured {measured / MIB:,.0f} MiB"
    return f"{figures}, ratio {ratio:.2f}", ESTIMATE[0] <= ratio <= ESTIMATE[1]


CHECKS: dict[str, Callable[[Place], Result]] = {
    "training, evaluation and generation": train,
    "losses compared with the CPU": agree_with_cpu,
    "auto with a trial": find_peers,
    **{f"{m['name']} with 8 clients": partial(exchange_updates, method=m) for m in PCL},
    "conversations": converse,
    "resume": resume,
    "resume, deterministic algorithms": resume_deterministically,
    "two devices": divide_base,
    "memory of `coterie base`": estimate_memory,
}
"""All checks by name, in the order of the page."""
