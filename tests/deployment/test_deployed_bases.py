"""Real processes over TLS: a server with a model of its own among clients with other bases."""

import pytest

import coterie
from coterie.config.run import parse
from coterie.runs import RunFolder

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from sites import Deployment, assert_same_bits

pytestmark = pytest.mark.thorough


def test_it_ends_in_the_bits_and_score_of_one_process_though_the_server_is_killed(
    values, bases, tmp_path
) -> None:
    common, test = tmp_path / "common.txt", tmp_path / "test.txt"
    common.write_text("What everybody may see. " * 40, encoding="utf-8")
    test.write_text("What the server is asked. " * 40, encoding="utf-8")
    run = values(method="pretrained", rounds=2, bases={"poet": str(bases / "llama")})
    run["data"] = {**run["data"], "public": str(common)}
    run["server"] = {"base": str(bases / "llama"), "test": str(test)}
    with Deployment(tmp_path / "deployment", run) as here:
        here.make_keys()
        here.serve()
        here.join("diarist", "poet")
        here.wait(lambda: "poet joined" in here.programs["server"].text)
        here.kill("server")
        here.serve("--resume")
        here.join("whaler")
        local = RunFolder(coterie.run(parse(run), out=tmp_path / "local").path)
        assert set(here.ends().values()) == {0}
        assert_same_bits(here, local)
        result = here.server.result
    assert result is not None
    assert local.result is not None
    assert result["server"] == local.result["server"]
