"""Processes over TLS: example transforms, which --plugin loads, and a server with a model."""

from pathlib import Path
from typing import Any

import pytest
from looped import NAMES, result_of

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_tensors

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from sites import Deployment, assert_same_bits

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"


def run_file(values: Any, transform: str) -> dict[str, Any]:
    return values(rounds=2, aggregation={"transforms": [transform], "largest_change": None})


@pytest.mark.parametrize("transform", ["int8", "masked_sum"])
def test_a_deployment_ends_in_the_bits_of_one_process(transform, values, tmp_path) -> None:
    file = EXAMPLES / f"{transform}.py"
    load_plugin(file)
    run = run_file(values, transform)
    local = RunFolder(coterie.run(parse(run), out=tmp_path / "local").path)
    with Deployment(tmp_path / "deployment", run, plugins=(file,)) as deployment:
        deployment.serve()
        deployment.join()
        assert deployment.ends() == {"server": 0, **dict.fromkeys(NAMES, 0)}
        # Without clients' secrets, which differ in every run.
        assert_same_tensors(deployment.server.load("server"), local.load("server"), "server")
        for name in NAMES:
            side = f"client-{name}"
            assert_same_tensors(deployment.client(name).load(side), local.load(side), side)
            trained = result_of(deployment.client(name))["trained"]
            assert trained == {name: result_of(local)["trained"][name]}


def test_a_client_with_another_file_is_refused(values, tmp_path) -> None:
    file, other = EXAMPLES / "int8.py", tmp_path / "int8.py"
    other.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    run = run_file(values, "int8")
    with Deployment(tmp_path / "deployment", run, plugins=(file,)) as deployment:
        deployment.serve()
        deployment.plugins = ["--plugin", str(other)]
        deployment.join("poet")
        deployment.wait(
            lambda: "different version of the plugin int8.py" in deployment.programs["poet"].text
        )
        assert deployment.done() == 0


@pytest.mark.thorough
def test_a_killed_server_with_a_model_ends_in_the_same_bits(values, bases, tmp_path) -> None:
    common, test = tmp_path / "common.txt", tmp_path / "test.txt"
    common.write_text("What everybody may see. " * 40, encoding="utf-8")
    test.write_text("What the server is asked. " * 40, encoding="utf-8")
    run = values(method="pretrained", rounds=2, bases={"poet": str(bases / "llama")})
    run["data"] = {**run["data"], "public": str(common)}
    run["server"] = {"base": str(bases / "llama"), "test": str(test)}
    with Deployment(tmp_path / "deployment", run) as deployment:
        deployment.serve()
        deployment.join("diarist", "poet")
        deployment.wait(lambda: "poet joined" in deployment.programs["server"].text)
        deployment.kill("server")
        deployment.serve("--resume")
        deployment.join("whaler")
        local = RunFolder(coterie.run(parse(run), out=tmp_path / "local").path)
        assert set(deployment.ends().values()) == {0}
        assert_same_bits(deployment, local)
        assert result_of(deployment.server)["server"] == result_of(local)["server"]
