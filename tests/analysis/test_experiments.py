"""Runs are found wherever they lie and put together as their settings say."""

import json
from statistics import stdev

import pytest

from coterie import CoterieError
from coterie.analysis import Comparison
from coterie.analysis.experiments import MEAN, experiments
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.report.page import _runs_table

LOCAL = {"name": "local", "mlp": {"rank": 8}}


def test_seeds_are_together_and_settings_that_differ_are_in_the_label(written, tmp_path) -> None:
    for seed in (1, 0):
        written(f"cmp/local-{seed}", LOCAL, seed)
    written("cmp/comigs-a", {"name": "comigs-1g1s", "mlp": {"rank": 8}, "router": {"every": 5}})
    written("cmp/comigs-b", {"name": "comigs-1g1s", "mlp": {"rank": 8}, "router": {"every": 9}})
    (experiment,) = experiments([tmp_path / "cmp"])
    assert experiment.name == "cmp"
    seeds = {label: [r.config["seed"] for r in runs] for label, runs in experiment.runs.items()}
    mixtures = {f"comigs-1g1s router.every={every}": [0] for every in (5, 9)}
    assert seeds == {"local": [0, 1], **mixtures}
    assert experiment.clients == ["anna", "ben"]


def test_a_label_names_the_settings_that_a_run_has(written, tmp_path) -> None:
    without = {"name": "local", "mlp": None, "attention": {"rank": 8}}
    for number, method in enumerate((LOCAL | {"attention": {"rank": 4}}, without)):
        written(f"cmp/{number}", method, training={"steps": 2, "batch": 2 + number})
    (experiment,) = experiments([tmp_path / "cmp"])
    assert list(experiment.runs) == [
        "local mlp.rank=8 attention.rank=4 batch=2",
        "local attention.rank=8 batch=3 mlp=None",
    ]


def test_folders_of_folders_and_baselines_are_searched(written, tmp_path) -> None:
    written("table/one/run", {"name": "fedavg"})
    written("table/one/run/baselines/local", LOCAL)
    written("table/two/run", LOCAL, data={"window": 99})
    first, second = experiments([tmp_path / "table", tmp_path / "table" / "one"])
    assert (first.name, list(first.runs)) == ("one", ["local", "fedavg"])
    assert (second.name, list(second.runs)) == ("two", ["local"])
    assert [len(runs) for runs in first.runs.values()] == [1, 1]  # none twice
    (alone,) = experiments([tmp_path / "table" / "one" / "run"])
    assert (alone.name, len(alone.all)) == ("run", 2)


def test_a_key_that_is_not_set_does_not_make_another_experiment(written, tmp_path) -> None:
    written("cmp/old", LOCAL)
    written("cmp/new", LOCAL, 1, data={"window": 16, "public": None})
    written("cmp/newer", LOCAL, 3, bases={}, server=None)
    written("cmp/other", LOCAL, 2, data={"window": 16, "public": "all.txt"})
    written("cmp/third", LOCAL, 2, data={"window": 16, "public": "some.txt"})
    listed = experiments([tmp_path / "cmp"])
    assert [len(experiment.all) for experiment in listed] == [3, 1, 1]
    assert [experiment.name for experiment in listed] == ["cmp", "cmp-2", "cmp-3"]


def test_other_bases_or_another_server_make_another_experiment(written, tmp_path) -> None:
    own = {"bases": {"ben": "small"}, "server": {"base": None, "test": None}}
    for seed in (0, 1):
        written(f"cmp/{seed}", LOCAL, seed, **own)
    written("cmp/plain", LOCAL)
    written("cmp/bases", LOCAL, bases={"ben": "large"}, server=own["server"])
    written("cmp/server", LOCAL, bases=own["bases"], server={"base": "large", "test": None})
    listed = experiments([tmp_path / "cmp"])
    assert sorted(len(experiment.all) for experiment in listed) == [1, 1, 1, 2]
    assert {_runs_table(experiment).note for experiment in listed} == {
        "Base: tiny-gpt2. Clients: anna and ben.",
        "Base: tiny-gpt2 and small. Clients: anna and ben. Server's base: tiny-gpt2.",
        "Base: tiny-gpt2 and large. Clients: anna and ben. Server's base: tiny-gpt2.",
        "Base: tiny-gpt2 and small. Clients: anna and ben. Server's base: large.",
    }


def test_a_run_in_progress_counts_only_while_none_is_finished(written, tmp_path) -> None:
    score = (0, "anna", "test/trained", {"perplexity": 99.0})
    written("cmp/a", LOCAL, 0, perplexities=None, figures=[score])
    (experiment,) = experiments([tmp_path / "cmp"])
    (run,) = experiment.drawn["local"]
    assert run.progress == "seed 0: 1 of 4 rounds"
    assert run.series(PERPLEXITY).to_dict() == {"anna": {1: 99.0}, MEAN: {1: 99.0}}
    written("cmp/b", LOCAL, 1)
    (experiment,) = experiments([tmp_path / "cmp"])
    assert [run.config["seed"] for run in experiment.drawn["local"]] == [1]
    assert len(experiment.runs["local"]) == 2


def test_series_have_a_mean_where_all_clients_have_a_figure(written, tmp_path) -> None:
    perplexities = [(0, "anna", 3.0), (1, "anna", 5.0), (1, "ben", 7.0), (2, "ben", 1.0)]
    figures = [(round, c, "test/trained", {"perplexity": p}) for round, c, p in perplexities]
    figures += [(1, None, "server/aggregated", {"perplexity": 4.0})]
    for seed in (0, 1):
        written(f"cmp/{seed}", LOCAL, seed, figures)
    (experiment,) = experiments([tmp_path / "cmp"])
    series = experiment.series.loc["local"]
    means = {(n, r): m for n in (0, 1) for r, m in ((2, 6), (4, 15))}
    assert series[MEAN].dropna().to_dict() == means
    assert series["server"].dropna().to_dict() == {(0, 2): 4, (1, 2): 4}
    assert experiment.clients == ["anna", "ben"]


def test_a_folder_without_runs_is_refused(tmp_path) -> None:
    with pytest.raises(CoterieError, match="neither a run folder nor a folder of runs"):
        experiments([tmp_path])


def test_a_server_s_own_model_is_in_the_comparison(written, tmp_path) -> None:
    for seed, perplexity in enumerate((4.0, 6.0)):
        file = written(f"cmp/fedmkt-{seed}", {"name": "fedmkt"}, seed) / "result.json"
        score = {"perplexity": perplexity, "bits_per_byte": 0.5}
        file.write_text(json.dumps({**json.loads(file.read_text()), "server": score}))
    written("cmp/local", LOCAL)
    (experiment,) = experiments([tmp_path / "cmp"])
    table = Comparison(experiment.name, experiment.finished).table()
    column = {row[0]: row[-1] for row in table.rows}
    assert table.columns[-1] == "server"
    assert column == {"local": "", "fedmkt": f"5.00 ({stdev([4, 6]):.2f})"}
    assert experiment.clients == ["anna", "ben"]
