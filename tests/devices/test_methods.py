"""Every method on the test device: local, deployed and resumed runs match runs on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DeviceTensor
from every_method import BEHAVIOURS, METHODS, marks, run_of, some
from placed import PLACES

import coterie
from coterie.config.run import RunConfig
from coterie.methods.fedmkt.method import FedMKT
from coterie.methods.registry import available
from coterie.runs import RunFolder
from coterie.testing.contract import Stop
from coterie.testing.loop import assert_as_local, assert_same_states, deploy
from coterie.testing.rounds import joined, one_round

HERE = {"auto", "fedavg", "comigs-1g1s", "pcl-1", "flexlora, ranks", "fedamole", "fedmkt"}
"""The methods that `make test` runs on one device; `make slow` and `make thorough` add others."""
PHASES = {"auto": "trust", "pcl-1": "trust", "cobo": "trust", "fdlora": "fusion"}
"""The metric that shows that a method's own phase took place."""


def run_with_phases(name: str, values: Any, teachers: Any) -> RunConfig:
    """Return a run that is long enough for each phase of the method to take place once."""
    method = dict(METHODS[name])
    router = available()[method["name"]].model_fields.get("router")
    if hasattr(getattr(router, "default", None), "every"):
        method["router"] = {"every": 2, "steps": 1} | method.get("router", {})
    return run_of(method, values, teachers, rounds=4 if name == "auto" else 2)


@pytest.fixture(scope="module")
def on_cpu(values, teachers, tmp_path_factory) -> Callable[[str], tuple[RunConfig, RunFolder]]:
    """A function that returns a method's run and its folder after the run on the CPU."""
    folders: dict[str, tuple[RunConfig, RunFolder]] = {}

    def run(name: str) -> tuple[RunConfig, RunFolder]:
        if name not in folders:
            config = run_with_phases(name, values, teachers)
            done = coterie.run(config, out=tmp_path_factory.mktemp("cpu") / "run")
            folders[name] = config, RunFolder(done.path)
        return folders[name]

    return run


@pytest.fixture
def method(request, on_cpu) -> tuple[RunConfig, RunFolder]:
    """A method's run and its folder, computed on the CPU before the test device is used."""
    return on_cpu(request.param)


def placed(run: RunConfig, device: Any) -> RunConfig:
    return run.model_copy(update={"device": device})


def places() -> list[Any]:
    """Return pairs of a method and a device. The methods in `HERE` have no mark on one device."""
    pairs = [(name, place) for name in METHODS for place in PLACES]
    fast = {(name, "one device") for name in HERE}
    slow = {(name, place) for name in {*BEHAVIOURS, "auto", "pcl-1"} for place in PLACES}
    return [pytest.param(*pair, marks=marks(pair, fast, slow)) for pair in pairs]


@pytest.mark.parametrize(("method", "place"), places(), indirect=True)
def test_a_run_ends_with_the_bits_of_the_cpu(method, place, tmp_path) -> None:
    config, expected = method
    done = coterie.run(placed(config, place), out=tmp_path / "run")
    folder = RunFolder(done.path)
    assert_same_states(folder, expected)
    if phase := PHASES.get(config.method.name):
        assert phase in {line["name"] for line in folder.metrics()}


@pytest.mark.parametrize("method", some({"auto", "fedmkt"}, METHODS, BEHAVIOURS), indirect=True)
def test_a_deployment_with_clients_on_a_device(method, gpu, tmp_path) -> None:
    config, expected = method
    run = placed(config, gpu)
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, expected)


@pytest.mark.parametrize("method", some({"auto"}, METHODS, BEHAVIOURS), indirect=True)
def test_a_stopped_run_is_resumed(method, gpu, tmp_path) -> None:
    config, expected = method
    with pytest.raises(KeyboardInterrupt):
        coterie.run(placed(config, gpu), out=tmp_path / "run", callbacks=[Stop()])
    coterie.resume(tmp_path / "run")
    assert_same_states(RunFolder(tmp_path / "run"), expected)


WITHOUT_MODEL = [n for n, m in METHODS.items() if not issubclass(available()[m["name"]], FedMKT)]
"""The methods whose servers train no model."""


@pytest.mark.parametrize(
    "method", some({"auto", "fedamole"}, WITHOUT_MODEL, BEHAVIOURS), indirect=True
)
def test_a_server_is_on_the_cpu_and_a_client_on_its_device(method, gpu) -> None:
    """Check that messages and the server's tensors are on the CPU."""
    local = joined(placed(method[0], gpu))
    uploads = one_round(local, 0)
    one_round(local, 1)
    assert not list(device_tensors((local.server, local.value)))
    for name, side in local.clients.items():
        assert all(isinstance(p.tensor, DeviceTensor) for p in side.parameters().values())
        assert not any(isinstance(tensor, DeviceTensor) for *_, tensor in uploads[name].tensors())


def device_tensors(value: Any, seen: set[int] | None = None) -> Any:
    """Yield the tensors on the test device that an object refers to, outside models."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, DeviceTensor):
        yield value
    elif isinstance(value, dict | list | tuple | set):
        for item in value.values() if isinstance(value, dict) else value:
            yield from device_tensors(item, seen)
    elif type(value).__module__.startswith("coterie"):
        yield from device_tensors(getattr(value, "__dict__", {}), seen)
