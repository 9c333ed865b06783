"""Table files: what they say, what is wrong with them, and filling them in."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from coterie import CoterieError
from coterie.analysis.experiments import MEAN
from coterie.config.run import parse
from coterie.engines.rounds import Rounds
from coterie.runs import Callback, RunFolder, RunStart
from reproduce.table_file import is_table, merged, slug, table_folder
from reproduce.tables import compare_table, load_table

Make = Callable[..., Path]


@pytest.fixture
def table(values, tmp_path) -> Make:
    """Writes a table file of two columns, the second with other clients; arguments replace keys."""
    run = values(rounds=1)
    del run["method"]
    clients = run.pop("clients")

    def make(**changes: Any) -> Path:
        file = {
            "table": "Two by two",
            "run": run,
            "columns": [
                {"name": "All Three", "run": {"clients": clients}},
                {"name": "two", "run": {"clients": clients[:2]}},
            ],
            "rows": [
                {"method": "pretrained", "paper": [9, None]},
                {
                    "name": "Low rank",
                    "method": {"name": "fedavg", "mlp": {"rank": 2}},
                    "paper": [8, 7],
                },
                {"method": "centralized"},
            ],
        }
        path = tmp_path / "table.yaml"
        path.write_text(yaml.safe_dump(file | changes))
        return path

    return make


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """The names of the runs that are worked on."""
    names: list[str] = []
    original = Rounds.run

    def run(self: Rounds) -> None:
        names.append(self.config.name)
        original(self)

    monkeypatch.setattr(Rounds, "run", run)
    return names


def test_columns_merge_over_the_common_run_and_settings_over_both(table) -> None:
    path = table(
        columns=[
            {
                "name": "A",
                "run": {"clients": [{"name": "x", "path": "x.txt"}], "training": {"steps": 7}},
                "methods": {"Low rank": {"mlp": {"sets": 1}, "attention": {"rank": 1}}},
            }
        ],
        rows=[{"name": "Low rank", "method": {"name": "fedavg", "mlp": {"rank": 2}}}],
    )
    _, (column,) = load_table(path, ["training.batch=5"])
    cell = column.cells["Low rank"]
    assert (cell.training.steps, cell.training.batch, cell.training.precision) == (7, 5, "fp32")
    described = cell.method.described()
    assert described["mlp"] == {
        "rank": 2,
        "placement": "auto",
        "sets": 1,
    }  # the row's and the column's
    assert described["attention"] == {"rank": 1, "targets": None}
    assert cell.name == "low-rank"


def test_a_regime_is_merged_over_every_columns_run(table) -> None:
    regimes = {"little text": {"training": {"steps": 2}, "rounds": 5}}
    clients = [{"name": "x", "path": "x.txt"}]
    path = table(
        regimes=regimes,
        columns=[{"name": "A", "run": {"clients": clients, "training": {"steps": 7, "batch": 3}}}],
        rows=[{"method": "local"}],
    )
    assert load_table(path)[1][0].run.training.steps == 7
    spec, (column,) = load_table(path, ["rounds=6"], regime="little text")
    training = column.cells["local"].training
    assert (training.steps, training.batch, column.run.rounds) == (2, 3, 6)
    assert spec.table == "Two by two: little text"
    with pytest.raises(CoterieError, match=r"no regime 'much' \(regimes: little text\)\.$"):
        load_table(path, regime="much")
    with pytest.raises(CoterieError, match=r"no regime 'much' \(regimes: none\)\.$"):
        load_table(table(), regime="much")
    assert table_folder(path, "little text").name.endswith("-table-little-text")


def test_relative_data_start_at_the_files_folder(table, tmp_path) -> None:
    column = {"name": "A", "run": {"clients": [{"name": "x", "path": "x.txt"}]}}
    path = table(columns=[column], rows=[{"method": "local"}], run={"data_root": "texts"})
    assert load_table(path)[1][0].run.root == tmp_path / "texts"
    assert load_table(path, ["data_root=/else"])[1][0].run.root == Path("/else")


def test_merging_and_slugs() -> None:
    below = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(below, {"a": {"b": 3}, "d": [2]}) == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert below == {"a": {"b": 1, "c": 2}, "d": [1]}
    assert slug("AG News (low), 2.5") == "ag-news-low-2.5"


def test_rows_and_columns_are_chosen_by_name_or_method(table) -> None:
    _, columns = load_table(table(), methods=["fedavg", "pretrained"], columns=["all three"])
    assert [column.spec.name for column in columns] == ["All Three"]
    assert list(columns[0].cells) == ["pretrained", "Low rank"]
    _, columns = load_table(table(), methods=["low rank"])
    assert [list(column.cells) for column in columns] == [["Low rank"], ["Low rank"]]
    with pytest.raises(CoterieError, match=r"no row 'zed' \(rows: pretrained, Low rank, cent"):
        load_table(table(), methods=["zed"])
    with pytest.raises(CoterieError, match=r"no column 'zed' \(columns: All Three, two\)"):
        load_table(table(), columns=["zed"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rowz": []}, "Unknown key 'rowz'. Did you mean 'rows'?"),
        ({"rows": []}, "needs `rows`"),
        ({"rows": [{"name": "x"}]}, r"rows\[0\].method is missing"),
        ({"rows": [{"methud": "local"}]}, r"Did you mean 'rows\[0\].method'"),
        (
            {"rows": [{"method": "local", "paper": [1]}]},
            "'local' has 1 paper figures for 2 columns",
        ),
        (
            {"rows": [{"method": "local", "paper_std": [1]}]},
            "'local' has 1 paper deviations for 2 columns",
        ),
        ({"against": "locla"}, r"^`against` names no row: 'locla' \(rows: pretrained, Low rank"),
        (
            {"shows": "messages", "figure": {"kind": "lines"}},
            "A table of messages has no `figure`",
        ),
        ({"figure": {"kind": "curves"}}, "column 'All Three': curves .* set evaluation.every"),
        ({"regimes": {"a": {}, "A": {}}}, "Two `regimes` have the same or a similar name 'A'"),
        ({"rows": [{"method": "local", "paper": [1, "x"]}]}, "should be a number"),
        ({"rows": [{"method": "local"}] * 2}, "Two `rows` have the same or a similar name 'local'"),
        ({"columns": []}, "columns"),
        (
            {"columns": [{"name": "A", "methods": {"zed": {}}}], "rows": [{"method": "local"}]},
            "the unknown row 'zed'",
        ),
        (
            {"columns": [{"name": "A"}, {"name": "a"}], "rows": [{"method": "local"}]},
            "Two `columns` have the same or a similar name 'A'",
        ),
        (
            {"columns": [{"name": "A"}], "rows": [{"method": "local"}]},
            "column 'A': The run has no clients",
        ),
        ({"rows": [{"method": "local", "run": {"base": "x"}}]}, "'local' may .* but not 'base'"),
        ({"rows": [{"method": "fedavgg"}]}, "row 'fedavgg': There is no method"),
        ({"rows": [{"method": {"name": "local", "ranc": 3}}]}, "Unknown key 'method.ranc'"),
        ({"run": {"method": "local"}}, "remove 'method'"),
        ({"seeds": 0}, "seeds should be"),
        ({"shows": "colours"}, "There is no metric 'colours'.*perplexity, accuracy,"),
        ({"shows": "rouge_l"}, "column 'All Three': rouge_l .* set evaluation.generate"),
    ],
)
def test_what_is_wrong_is_one_sentence(changes, sentence, table) -> None:
    with pytest.raises(CoterieError, match=sentence):
        load_table(table(**changes))


def test_a_table_file_is_told_from_a_run_file(table, values, tmp_path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(values()))
    assert is_table(table())
    assert not is_table(run)


@pytest.mark.slow
def test_a_table_is_filled_in_kept_and_found_again(table, values, tmp_path, counted) -> None:
    out, messages = tmp_path / "out", []
    path = table()
    with pytest.raises(KeyboardInterrupt):
        compare_table(path, out=out, callbacks=[StopAtFedAvg()])
    begun = json.loads((out / "table.json").read_text())["columns"]
    assert [row["row"] for row in begun[0]["rows"] if row["seeds"]] == ["pretrained"]
    shown = compare_table(path, out=out, seeds=2, report=messages.append)
    assert messages[0] == "Run 1 of 12: pretrained-seed0 (already finished)"
    assert messages[11] == "Run 12 of 12: centralized-seed1"
    rows = ["pretrained", "low-rank", "centralized"]
    runs = [f"{row}-seed{seed}" for seed in (0, 1) for row in rows]
    assert counted == [*runs[:2], *runs[1:], *runs]  # the interrupted one was continued
    # The cell of a row with its method's name is the one that `compare` would make.
    cell = parse(values(rounds=1, method="pretrained"))
    folder = RunFolder(out / "all-three" / f"pretrained-seed0-{cell.digest()}")
    assert folder.result is not None
    compare_table(path, out=out, seeds=2)
    assert len(counted) == len([*runs[:2], *runs[1:], *runs])
    columns = shown["columns"]
    ours = columns[0]["rows"][0]
    cells = (out / "all-three").glob("pretrained-seed*")
    scores = [
        score for cell in cells for score in (RunFolder(cell).result or {})["trained"].values()
    ]
    assert ours["perplexity"] == pytest.approx(fmean(score["perplexity"] for score in scores))
    assert [row["seeds"] for row in columns[1]["rows"]] == [2, 2, 2]
    assert "| Low rank |" in (out / "table.md").read_text()


class StopAtFedAvg(Callback):
    def on_run_begin(self, run: RunStart) -> None:
        if run.method == "fedavg":
            raise KeyboardInterrupt


def test_what_cannot_run_is_refused_before_anything_is(table, tmp_path, counted) -> None:
    rows = [{"method": "pretrained"}, {"method": {"name": "fedavg", "mlp": {"rank": {"zed": 3}}}}]
    with pytest.raises(CoterieError, match=r"In column 'All Three', row 'fedavg': "):
        compare_table(table(rows=rows), out=tmp_path / "out")
    assert counted == []


@pytest.mark.slow
def test_the_point_of_evaluation_can_be_chosen(table, tmp_path) -> None:
    rows = [{"method": "fedavg"}]
    own = compare_table(table(rows=rows), out=tmp_path / "out")
    path = table(rows=rows, point="trained")
    trained = compare_table(path, out=tmp_path / "out")
    row, other = own["columns"][0]["rows"][0], trained["columns"][0]["rows"][0]
    assert row["perplexity"] == pytest.approx(row["aggregated"])
    assert other["perplexity"] == pytest.approx(row["trained"])


def test_rows_with_the_same_settings_share_their_runs(table, tmp_path, counted) -> None:
    rows = [
        {"name": "Averaged", "method": {"name": "fedavg", "mlp": {"rank": 2}}},
        {"name": "Tuned", "method": {"name": "fedavg", "mlp": {"rank": 2}}, "point": "trained"},
    ]
    path = table(rows=rows, figure={"kind": "curves"})
    every = ["evaluation.every=1", "rounds=2"]
    shown = compare_table(path, settings=every, columns=["two"], out=tmp_path / "out")
    assert counted == ["averaged-seed0"]
    averaged, tuned = shown["columns"][0]["rows"]
    for row in (averaged, tuned):  # of each row the scores at its own point
        assert row["rounds"]["round"] == [1, 2]
        last = {client: scores[1] for client, scores in row["rounds"]["mean"].items()}
        assert last.pop(MEAN) == round(row["perplexity"], 2)
        assert last == {client: round(score, 2) for client, score in row["clients"].items()}
    assert averaged["perplexity"] == averaged["aggregated"] == tuned["aggregated"]
    assert tuned["perplexity"] == tuned["trained"] != averaged["perplexity"]
    # Of a finished table, differences from another row are told without running anything.
    for against in ("Averaged", "Tuned"):
        compare_table(path, settings=every, columns=["two"], out=tmp_path / "out", against=against)
        page = (tmp_path / "out" / "table.md").read_text()
        assert f"| method | difference from {against} | 95 % interval | p |" in page
    assert counted == ["averaged-seed0"]


def test_a_text_has_no_accuracy_to_show(table, tmp_path) -> None:
    rows = [{"method": "pretrained", "paper": [9, None], "paper_std": [0.5, None]}]
    path = table(rows=rows, shows="accuracy", regimes={"two": {"seed": 2}}, against="pretrained")
    shown = compare_table(path, regime="two", out=tmp_path / "out")
    assert [column["metric"] for column in shown["columns"]] == ["perplexity"] * 2
    assert [column["rows"][0]["paper_std"] for column in shown["columns"]] == [0.5, None]
    assert (shown["file"], shown["regime"]) == (str(path), "two")
    assert shown["command"] == f"python -m reproduce {path} --regime two"
    assert [path.name[:13] for path in (tmp_path / "out" / "two").iterdir()] == ["pretrained-se"]
    with pytest.raises(CoterieError, match=rf"holds the table {path.stem}-two; choose another"):
        compare_table(path, out=tmp_path / "out")


@pytest.mark.slow
def test_rows_are_tuned_column_by_column(table, tmp_path, counted) -> None:
    tune = {"training.learning_rate": ["1e-4", 0.01]}
    path, out = (
        table(tune=tune, rows=[{"method": "local"}, {"method": "pretrained"}]),
        tmp_path / "o",
    )
    messages: list[str] = []
    shown = compare_table(path, columns=["two"], out=out, report=messages.append)
    assert counted == ["local-trial1", "local-trial2", "local-seed0", "pretrained-seed0"]
    assert messages[-1] == "Run 4 of 4: pretrained-seed0"
    local, pretrained = shown["columns"][0]["rows"]
    figures = {str(t["settings"]): t["perplexity"] for t in local["tuned"]["trials"]}
    assert str(local["tuned"]["settings"]) == min(figures, key=figures.__getitem__)
    assert "tuned" not in pretrained
    assert len(list((out / "two" / "trials").iterdir())) == 2
    assert "training.learning_rate: best of 2 trials" in (out / "table.md").read_text()
    # Other values are tried in place of the file's; those that were tried before are found again.
    tune["training.learning_rate"] = [0.01, 0.02]
    more = compare_table(path, columns=["two"], out=out, tune=tune, against="local")
    assert counted[4] == "local-trial2"
    command = more["command"]
    assert "--tune training.learning_rate=0.01,0.02 --columns two --against local" in command
    assert more["columns"][0]["rows"][1]["difference"]["from"] == "local"


def test_what_a_table_cannot_be_tuned_by_is_told_with_its_column(table) -> None:
    with pytest.raises(CoterieError, match=r"column 'All Three': data\.window cannot be"):
        load_table(table(tune={"data.window": [8]}))
    with pytest.raises(
        CoterieError, match=r"column 'All Three': training\.batch should be a whole"
    ):
        load_table(table(), tune={"training.batch": ["x"]})
    row = {"method": "local", "tune": {"data.window": [8]}}
    with pytest.raises(CoterieError, match=r"row 'local': data\.window cannot be"):
        load_table(table(rows=[row]))


@pytest.mark.slow
def test_a_row_has_values_of_its_own_to_be_tried_with(table, tmp_path, counted) -> None:
    rows = [{"method": "hetlora", "tune": {"method.gamma": [0.5, 0.9]}}, {"method": "local"}]
    shown = compare_table(table(rows=rows), columns=["two"], out=tmp_path / "out")
    assert counted == ["hetlora-trial1", "hetlora-trial2", "hetlora-seed0", "local-seed0"]
    hetlora, local = shown["columns"][0]["rows"]
    assert hetlora["tuned"]["settings"].keys() == {"method.gamma"}
    assert "tuned" not in local


def test_a_rows_keys_are_below_those_of_columns_and_of_the_command(table) -> None:
    path = table(rows=[{"method": "fedavg", "run": {"training": {"learning_rate": 0.5}}}])
    whole = yaml.safe_load(path.read_text())
    whole["columns"][1]["run"]["training"] = {"learning_rate": 0.25}
    path.write_text(yaml.safe_dump(whole))
    rates = [c.cells["fedavg"].training.learning_rate for c in load_table(path)[1]]
    assert rates == [0.5, 0.25]
    _, columns = load_table(path, settings=["training.learning_rate=0.125"])
    assert {c.cells["fedavg"].training.learning_rate for c in columns} == {0.125}


def test_rows_may_differ_in_their_data(table, tmp_path) -> None:
    # All rows of a column share a session, which must not give a row the data of another one.
    rows = [
        {"method": "local", "run": {"data": {"validation_for_training": 0.5}}},
        {"method": "fedavg"},
    ]
    compare_table(table(rows=rows), columns=["two"], seeds=1, out=tmp_path / "out")
    trained = {
        path.parent.name.split("-")[0]: json.loads(path.read_text())["clients"]["poet"]["tokens"]
        for path in tmp_path.glob("out/two/*/run.json")
    }
    assert trained["local"]["train"] != trained["fedavg"]["train"]
    assert trained["local"]["test"] == trained["fedavg"]["test"]


def test_the_papers_figures_of_columns_are_not_scores(table) -> None:
    with pytest.raises(CoterieError, match="give the paper's scores in `rows`"):
        load_table(
            table(columns=[{"name": "one", "paper": {"most": "0.4"}}], rows=[{"method": "local"}])
        )


def test_the_overlap_of_texts_needs_no_rows(table, tmp_path) -> None:
    shown = compare_table(table(shows="jaccard", rows=[]), out=tmp_path / "out")
    columns = json.loads((tmp_path / "out" / "table.json").read_text())["columns"]
    assert columns == shown["columns"]
    assert columns["two"].keys() == {"diarist", "poet"}
    assert columns["two"]["poet"]["diarist"] == columns["All Three"]["diarist"]["poet"]
    assert 0 < columns["two"]["poet"]["diarist"] < 1
    assert not list((tmp_path / "out").glob("*/"))  # nothing is run


def test_tokens_are_counted_without_rows_or_runs(table, tmp_path) -> None:
    path = table(shows="tokens", rows=[])
    shown = compare_table(path, settings=["data.limits.train=90"], out=tmp_path / "out")
    columns = json.loads((tmp_path / "out" / "table.json").read_text())["columns"]
    assert columns == shown["columns"]
    assert columns["two"].keys() == {"diarist", "poet"}
    assert {splits["train"] for splits in columns["All Three"].values()} == {90}
    assert "| poet | 90 |" in (tmp_path / "out" / "table.md").read_text()
    assert not list((tmp_path / "out").glob("*/"))


def test_messages_are_weighed_for_every_row(table, tmp_path) -> None:
    rows = [{"method": "local"}, {"method": {"name": "pcl-2", "warmup": 2, "every": 1}}]
    path = table(shows="messages", rows=rows)
    shown = compare_table(path, settings=["rounds=3"], out=tmp_path / "out")
    assert shown["columns"]["two"].keys() == {"local", "pcl-2"}
    assert "| pcl-2 | up | update |" in (tmp_path / "out" / "table.md").read_text()
