"""The example transforms between real processes, which load them with --plugin."""

from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_tensors

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from sites import Deployment

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
NAMES = ("diarist", "poet", "whaler")


def run_file(values: Any, transform: str) -> dict[str, Any]:
    aggregation = {"transforms": [transform], "largest_change": None}
    return values(rounds=2, aggregation=aggregation)


@pytest.mark.parametrize("transform", ["int8", "masked_sum"])
def test_a_deployment_ends_in_the_bits_of_one_process(transform, values, tmp_path) -> None:
    file = EXAMPLES / f"{transform}.py"
    load_plugin(file)
    run = run_file(values, transform)
    local = RunFolder(coterie.run(parse(run), out=tmp_path / "local").path)
    with Deployment(tmp_path / "deployment", run, plugins=(file,)) as here:
        here.make_keys()
        here.serve()
        here.join()
        assert here.ends() == {"server": 0, **dict.fromkeys(NAMES, 0)}
        # Without clients' secrets, which differ in every run.
        assert_same_tensors(here.server.load("server"), local.load("server"), "server")
        for name in NAMES:
            side = f"client-{name}"
            assert_same_tensors(here.client(name).load(side), local.load(side), side)
            mine, expected = here.client(name).result, local.result
            assert mine is not None
            assert expected is not None
            assert mine["trained"] == {name: expected["trained"][name]}


def test_a_client_with_another_file_is_refused(values, tmp_path) -> None:
    file, other = EXAMPLES / "int8.py", tmp_path / "int8.py"
    other.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    run = run_file(values, "int8")
    with Deployment(tmp_path / "deployment", run, plugins=(file,)) as here:
        here.make_keys()
        here.serve()
        here.plugins = ["--plugin", str(other)]
        here.join("poet")
        here.wait(lambda: "different version of the plugin int8.py" in here.programs["poet"].text)
        assert here.done() == 0
