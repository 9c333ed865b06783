"""A client whose upload is excluded goes on from its state before the round, in every engine."""

import coterie
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, deploy


def test_an_excluded_client_undoes_its_round_as_in_a_deployment(config, tmp_path) -> None:
    rates = {"whaler": 0.3}
    run = config(
        training={"learning_rates": rates}, rounds=4, deployment={"quorum": 2, "deadline": 60}
    )
    local = RunFolder(coterie.run(run, out=tmp_path / "local" / "run").path)
    assert local.result is not None
    assert set(local.result["left_out"]) == {"whaler"}
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)
