"""The script that tests the papers' claims on runs, on results made up here."""

import math
import os
from itertools import combinations
from operator import sub
from statistics import fmean, variance
from typing import Any

import pytest
import yaml

from coterie.analysis.frame import mean_score
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.runs import RunFolder
from reproduce import verdicts
from reproduce.pages import read_result
from reproduce.scenarios import NATS, POINTS, UNTRAINED, scenarios
from reproduce.table_file import read_table
from tests.written_runs import DESCRIPTION

PAPERS = yaml.safe_load(verdicts.CLAIMS.read_text())
CLAIMS = [verdicts.Claim.model_validate(claim) for claims in PAPERS.values() for claim in claims]


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.claim for claim in CLAIMS])
def test_a_claim_names_rows_columns_and_clients_that_there_are(claim) -> None:
    spec, columns = read_table(verdicts.ROOT / "recipes" / "small" / f"{claim.table}.yaml")
    assert {row for test in claim.tests for row in test.rows} <= {row.label for row in spec.rows}
    tables = [read_table(path)[0] for path in claim.tables]
    assert set(claim.columns) <= {column.name for table in tables for column in table.columns}
    assert {column.name for column in spec.columns} & set(claim.columns) or not claim.columns
    for column in columns:
        if claim.clients:
            assert set(claim.clients) < {client["name"] for client in column.run["clients"]}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_page_keeps_its_text_and_the_tests_not_repeated(paper) -> None:
    text = (verdicts.ROOT / f"{paper.lower()}.md").read_text(encoding="utf-8")
    rows = [["1", "full", "News", "a better than b", "1.00, 2.00", "-1.00", "", "1", "holds"]]
    written = verdicts.with_tests(text, rows)
    assert "| 1 | full | News |" in written
    assert written.count("a better than b") == 1
    around = [text.split(verdicts.START)[0], text.split(verdicts.END)[1]]
    assert [written.split(verdicts.START)[0], written.split(verdicts.END)[1]] == around
    assert all(line in written for line in text.splitlines())
    again = verdicts.with_tests(written, [[*rows[0][:-1], "leans"]])
    assert again == written.replace("| -1.00 |  | 1 | holds |", "| -1.00 |  | 1 | leans |")


def result(**nats: list[float]) -> list[dict[str, Any]]:
    """Return one run, with nats by client for windows of one token."""
    items = {name: {"of": name, "nats": n, "tokens": [1] * len(n)} for name, n in nats.items()}
    scored = {name: {"perplexity": math.exp(sum(n) / len(n))} for name, n in nats.items()}
    return [{"reports": "trained", "trained": scored, "seed": 0, "items": {"trained": items}}]


def shares(*right: float) -> list[dict[str, Any]]:
    scored = {"ada": {"perplexity": 1.0, "accuracy": sum(right) / len(right)}}
    items = {"ada": {"of": "ada", "nats": [0.0], "tokens": [1], "accuracy": list(right)}}
    return [{"reports": "trained", "trained": scored, "seed": 0, "items": {"trained": items}}]


ROWS = {
    "low": result(ada=[1.0, 1.1, 1.2, 1.0]),
    "near": result(ada=[1.0, 1.1, 1.2, 1.01]),
    "high": result(ada=[2.0, 2.1, 2.3, 2.0]),
    "mixed": result(ada=[0.5, 1.9, 0.6, 1.4]),
    "mid": result(ada=[1.714, 1.714, 1.714, 1.714]),
}


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ({"better": "low", "than": ["high"]}, "holds"),
        ({"better": "high", "than": ["low"]}, "contradicted"),
        ({"better": "low", "than": ["mixed"]}, "leans"),
        ({"better": "mixed", "than": ["low"]}, "does not hold"),
        ({"better": "near", "than_worse_of": ["low", "high"]}, "holds"),
        ({"row": "near", "within": 3, "of": ["low"]}, "holds"),
        ({"row": "near", "within": 2, "of": ["low"]}, "too small for one seed"),
        ({"row": "high", "within": 100, "of": ["low"]}, "does not hold"),
        ({"row": "near", "within": 3, "of_better": ["low", "high"]}, "holds"),
        ({"better": "low", "than": ["near"]}, "too small for one seed"),
        ({"row": "mid", "nearer": "low", "than": ["high"]}, "too small for one seed"),
        ({"row": "near", "nearer": "low", "than": ["high"]}, "holds"),
        ({"row": "near", "nearer": "high", "than": ["low"]}, "does not hold"),
    ],
)
def test_what_an_inequality_of_perplexity_says(test, verdict) -> None:
    [cells] = verdicts.tried(verdicts.Test.model_validate(test), ROWS, PERPLEXITY)
    assert cells[-1] == verdict


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_small_difference_of_one_seed_gets_no_verdict(seeds) -> None:
    perplexities = {"a": 97.95, "b": 100.0, "c": 100.1}  # 2.05 and 2.15 % apart
    right = {"a": 82, "b": 100, "c": 102}  # of 1000 samples: 1.8 and 2 points apart
    texts = {row: result(ada=[math.log(value)] * 4) for row, value in perplexities.items()}
    answers = {row: shares(*[1.0] * n, *[0.0] * (1000 - n)) for row, n in right.items()}
    for given, metric, verdict in (texts, PERPLEXITY, "holds"), (answers, ACCURACY, "contradicted"):
        rows = {row: [{**run, "seed": n} for n in range(seeds)] for row, [run] in given.items()}
        cells = verdicts.tried(verdicts.Test(better="a", than=("b", "c")), rows, metric)
        small = "too small for one seed" if seeds == 1 else verdict
        assert [row[-1] for row in cells] == [small, verdict]


def test_the_noise_of_one_seed_is_measured_on_the_grid() -> None:
    variances: dict[Any, list[float]] = {NATS: [], POINTS: []}
    for scenario in scenarios(read_result(verdicts.ROOT / "results" / "grid.json")):
        rows = [c for row, c in scenario.cells.items() if len(c) == 3 and row != UNTRAINED]
        means = [[fmean(cell["losses"].values()) for cell in row.values()] for row in rows]
        variances[scenario.unit] += (variance(map(sub, *p)) for p in combinations(means, 2))
    nats, points = (2 * math.sqrt(fmean(known)) for known in variances.values())
    assert math.ceil(1000 * math.expm1(nats)) / 10 == verdicts.NOISE
    assert math.ceil(10 * points) / 10 == verdicts.NOISE_OF_SHARES


def test_of_accuracy_more_is_better_and_both_figures_are_told() -> None:
    rows = {"good": shares(*[1.0] * 30), "bad": shares(*[0.0] * 15, *[1.0] * 15)}
    test = verdicts.Test(better="good", than=("bad",))
    [cells] = verdicts.tried(test, rows, ACCURACY)
    assert cells[:3] == ("good better than bad", "100.00, 50.00", "+50.00")
    assert cells[-1] == "holds"


def test_clients_can_be_looked_at_alone() -> None:
    [both] = result(ada=[1.0, 1.0], ben=[3.0, 3.0])
    alone = verdicts.of_clients(both, ["ada"])
    assert mean_score([alone], PERPLEXITY.name) == pytest.approx(math.e)
    assert list(alone["items"]["trained"]) == ["ada"]


def test_a_test_needs_only_one_of_the_rows_that_it_compares_with() -> None:
    test = verdicts.Test(better="low", than=("near", "high"))
    assert test.among({"low", "high"}) == verdicts.Test(better="low", than=("high",))
    assert test.among({"low"}) is None
    assert test.among({"near", "high"}) is None
    assert (
        verdicts.Test(better="low", than_worse_of=("near", "high")).among({"low", "high"}) is None
    )


def test_rows_are_compared_on_the_seeds_that_both_have() -> None:
    further = [{**run, "seed": 1} for run in result(ada=[9.0, 9.0, 9.0, 9.0])]
    rows = {**ROWS, "low": [*ROWS["low"], *further]}
    for test in ({"better": "low", "than": ["high"]}, {"row": "low", "within": 3, "of": ["near"]}):
        [cells] = verdicts.tried(verdicts.Test.model_validate(test), rows, PERPLEXITY)
        assert cells[1].startswith(PERPLEXITY.cell(mean_score(ROWS["low"], "perplexity")))
        assert cells[-2:] == ("1", "holds")
    unlike = {"low": further, "high": ROWS["high"]}
    test = verdicts.Test(better="low", than=("high",))
    assert list(verdicts.tried(test, unlike, PERPLEXITY)) == []


def test_claims_are_tested_in_the_real_counterparts_of_their_tables() -> None:
    def names(claim: verdicts.Claim) -> list[str]:
        return [f"{path.parent.name}/{path.stem}" for path in claim.tables]

    claim = verdicts.Claim(number=1, claim="", table="pcl-table4", tests=())
    assert names(claim) == ["small/pcl-table4", "real/pcl-table4"]
    assert names(claim.model_copy(update={"table": "pcl-table3"})) == ["small/pcl-table3"]
    other = claim.model_copy(update={"table": "fedamole-table3", "real": "fedamole-table1"})
    assert names(other) == ["small/fedamole-table3", "real/fedamole-table1"]


def test_a_tuned_cell_is_found_by_its_name_and_the_newest_counts(config, tmp_path) -> None:
    run = config()
    for n, name in enumerate(("my-row-seed0-aa", "my-row-seed0-bb", "other-seed0-cc")):
        RunFolder.create(tmp_path / name, DESCRIPTION)
        (tmp_path / name / "result.json").write_text(f'{{"reports": "trained", "n": {n}}}')
        os.utime(tmp_path / name, (n, n))
    [outcome] = verdicts.outcomes(tmp_path, run, None, "my-row")
    assert (outcome["n"], outcome["seed"]) == (1, 0)
    assert list(verdicts.outcomes(tmp_path, run, None)) == []


@pytest.mark.parametrize("low", ["good", "bad"])
def test_no_verdict_is_given_of_a_row_at_the_floor(low) -> None:
    rows = {"good": shares(*[1.0] * 30), "bad": shares(*[0.0] * 15, *[1.0] * 15)}
    for test in ({"better": "good", "than": ["bad"]}, {"row": "good", "within": 90, "of": ["bad"]}):
        inequality = verdicts.Test.model_validate(test)
        for at_floor, verdict in (([], "holds"), ([low], verdicts.AT_FLOOR)):
            tested = verdicts.tried(inequality, rows, ACCURACY, at_floor)
            assert [cells[-1] for cells in tested] == [verdict]
