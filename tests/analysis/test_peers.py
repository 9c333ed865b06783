"""Tests of the sentences that say with whom each client learns."""

import json

import pytest
from written_runs import written

from coterie.analysis.experiments import experiments
from coterie.analysis.peers import sentences

__all__ = ["written"]
AUTO = {"name": "auto"}


def peers_in(path) -> list[str]:
    """Return the sentences on the run of a method that is not `local`."""
    (experiment,) = experiments([path])
    (run,) = [run for run in experiment.all if run.method != "local"]
    return sentences(run, experiment.all)


def rows(round: int, **weights: dict[str, float]) -> list[tuple]:
    return [(round, client, "trust", row) for client, row in weights.items()]


FIRST = rows(1, anna={"anna": 0.3, "ben": 0.25, "carl": 0.45}, ben={"ben": 0.996, "carl": 0.004})


def test_the_latest_weights_are_listed_from_the_largest_without_the_clients_own(written) -> None:
    run = written("run", AUTO, figures=FIRST + rows(2, anna={"anna": 0.4, "dan": 0.3, "carl": 0.3}))
    assert peers_in(run) == ["anna learns with carl (0.30) and dan (0.30)", "ben learns alone"]


@pytest.mark.parametrize(
    ("scores", "end"),
    [
        ((9.4, 20.0), "; test perplexity 6.0 % lower than alone"),
        ((11.0, 20.0), "; test perplexity 10.0 % higher than alone"),
        ((10.0, 20.0), "; test perplexity the same as alone"),
    ],
)
def test_scores_are_compared_with_a_run_of_local(scores, end, written, tmp_path) -> None:
    written("us/auto", AUTO, figures=FIRST, perplexities=scores)
    written("us/local", {"name": "local"}, perplexities=(10.0, 20.0))
    assert peers_in(tmp_path / "us") == [f"anna learns with carl (0.45) and ben (0.25){end}",
                                     "ben learns alone"]  # fmt: skip


def test_shares_are_compared_in_points(written, tmp_path) -> None:
    written("us/auto", AUTO, figures=FIRST, accuracies=(0.75, 0.5))
    written("us/local", {"name": "local"}, accuracies=(0.5, 0.5))
    assert peers_in(tmp_path / "us")[0].endswith("; test accuracy 25.0 points higher than alone")


@pytest.mark.parametrize("other", [{"seed": 1}, {"perplexities": None}], ids=["seed", "unfinished"])
def test_no_comparison_with_another_seed_or_an_unfinished_run(other, written, tmp_path) -> None:
    written("us/auto", AUTO, figures=FIRST)
    written("us/local", {"name": "local"}, **other)
    assert peers_in(tmp_path / "us")[0] == "anna learns with carl (0.45) and ben (0.25)"


@pytest.mark.parametrize(
    ("kept", "reports", "peers"),
    [(1, "trained", None), (2, "trained", "ben"), (1, "aggregated", "ben"), (3, "trained", "carl")],
)
def test_weights_are_those_of_the_model_that_a_client_kept(kept, reports, peers, written) -> None:
    run = written("run", AUTO, figures=rows(1, anna={"ben": 1.0}) + rows(2, anna={"carl": 1.0}))
    result = json.loads((run / "result.json").read_text())
    result |= {"kept": {"anna": kept, "ben": 1}, "reports": reports}
    (run / "result.json").write_text(json.dumps(result))
    earlier = "anna kept a model from before its first weights for other clients"
    assert peers_in(run) == [f"anna learns with {peers} (1.00)" if peers else earlier]


def test_the_weights_of_the_last_mean_belong_to_no_earlier_model(written) -> None:
    three = rows(2, anna={"ben": 1.0}) + rows(3, anna={"carl": 1.0}) + rows(3, anna={"dan": 1.0})
    run = written("run", AUTO, figures=three)
    result = json.loads((run / "result.json").read_text()) | {"reports": "aggregated"}
    for kept, peer in ((2, "ben"), (3, "carl"), (4, "dan")):
        (run / "result.json").write_text(json.dumps(result | {"kept": {"anna": kept}}))
        assert peers_in(run) == [f"anna learns with {peer} (1.00)"]


def test_many_peers_are_shortened_and_many_clients_summed_up(written, tmp_path) -> None:
    names = [f"c{n:02}" for n in range(21)]
    few = written("few", AUTO, figures=rows(1, c00=dict.fromkeys(names[:13], 1 / 13)))
    first = ", ".join(f"{name} (0.08)" for name in names[1:8])
    assert peers_in(few) == [f"c00 learns with {first} and 5 others"]
    written("many/auto", AUTO, figures=[(1, name, "trust", {"c20": 1.0}) for name in names])
    assert peers_in(tmp_path / "many") == ["20 of 21 clients learn with others (1.0 on average)"]


def test_a_summary_counts_the_clients_with_better_scores(written, tmp_path) -> None:
    others = {f"c{n:02}": {"anna": 1.0} for n in range(19)}
    pairs = {"anna": {"ben": 1.0}, "ben": {"anna": 1.0}} | others
    figures = [*rows(1, **pairs), (3, "carl", "trust", {"ben": 1.0})]
    auto = written("us/auto", AUTO, figures=figures, perplexities=(9.0, 21.0))
    result = json.loads((auto / "result.json").read_text()) | {"kept": {"carl": 2}}
    (auto / "result.json").write_text(json.dumps(result))
    written("us/local", {"name": "local"})
    assert peers_in(tmp_path / "us") == [
        "21 of 21 clients learn with others (1.0 on average); test perplexity is better than alone "
        "for 1 of 2; 1 more kept a model from before their first weights for other clients"
    ]


def test_weights_that_are_only_recorded_are_not_described(written) -> None:
    assert peers_in(written("pcl", {"name": "pcl-2", "mix": False}, figures=FIRST)) == []
    assert peers_in(written("avg", {"name": "fedavg"})) == []
