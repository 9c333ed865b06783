"""Tables: their figures, and that they fit on a screen."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from coterie.analysis import Comparison, Table, run_table


def result(**perplexities: float) -> dict:
    scores = {n: {"perplexity": x, "bits_per_byte": x / 10} for n, x in perplexities.items()}
    return {"reports": "trained", "trained": scores, "aggregated": scores}


def shown(table: Table, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def test_a_runs_table_has_a_row_per_client_and_the_means() -> None:
    table = run_table({"local": result(a=10, b=20), "fedavg": result(a=30, b=50)}, "validation")
    assert "its own validation text" in table.title
    assert table.columns == ["client", "local", "fedavg"]
    assert table.rows == [
        ["a", "10.00 / 1.000", "30.00 / 3.000"],
        ["b", "20.00 / 2.000", "50.00 / 5.000"],
        ["mean", "15.00 / 1.500", "40.00 / 4.000"],
        ["worst client", "20.00 / 2.000 (b)", "50.00 / 5.000 (b)"],
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("methods", [2, 3, 4])
def test_bits_per_byte_are_dropped_before_a_table_is_split(methods, width) -> None:
    results = {f"method-{n}": result(ada=123.45, cleo=157.02) for n in range(methods)}
    tables = (run_table(results), Comparison("x", {n: [r] for n, r in results.items()}).table())
    for table in tables:
        lines = shown(table, width)
        whole = shown(replace(table, narrower=None), width)
        fits = sum(line.startswith("─") for line in whole) == 1
        assert table.narrower is not None
        assert lines == (whole if fits else shown(table.narrower, width))
        assert max(map(len, lines)) <= width
        assert "bits" in table.markdown()  # files contain all figures
        assert "bits" not in table.narrower.markdown()
        assert "15.702" not in table.narrower.markdown()


def test_the_table_of_the_demo_is_in_one_piece_at_80_columns() -> None:
    names = ("pretrained", "local", "auto")
    results = {name: result(ada=157.02, cleo=142.64) | {"kept": {"ada": 0}} for name in names}
    assert sum(line.startswith("─") for line in shown(run_table(results))) == 1


def test_tables_say_which_rounds_models_are_kept() -> None:
    best = result(a=10, b=20) | {"kept": {"a": 0, "b": 12}}
    pooled = result(a=30, b=50) | {"kept": {"everyone": 3}}
    table = run_table({"base": result(a=1, b=1), "local": best, "centralized": pooled})
    assert table.rows[:2] == [
        ["a", "1.00 / 0.100", "10.00 / 1.000 (0)", "30.00 / 3.000 (3)"],
        ["b", "1.00 / 0.100", "20.00 / 2.000 (12)", "50.00 / 5.000 (3)"],
    ]
    assert "In brackets: the round" in table.note
    results = {"base": [result(a=1, b=1)] * 2, "local": [best, best | {"kept": {"a": 4, "b": 13}}]}
    rows = Comparison("x", results).summary()
    assert [row["kept"] for row in rows] == [{}, {"a": [0, 4], "b": [12, 13]}]
    table = Comparison("x", results).table()
    column = table.columns.index("kept")
    assert [row[column] for row in table.rows] == ["", "0-13"]
    assert "Column `kept`: the round" in table.note
    assert "kept" not in Comparison("x", {"base": results["base"]}).table().columns
    assert "rackets" not in run_table({"base": result(a=1, b=1)}).note


def answered(**accuracies: float) -> dict:
    outcome = result(**{name: 1 + value for name, value in accuracies.items()})
    for name, value in accuracies.items():
        outcome["trained"][name] |= {"samples": 3, "accuracy": value, "rouge_l": value / 2}
    return outcome


def test_tables_show_drift() -> None:
    results = {
        "local": result(a=10, b=20) | {"drift": {"a": 1, "b": 2}},
        "pretrained": result(a=9, b=8),
    }
    table = run_table(results)
    assert table.rows[-1] == ["drift", "1.50", ""]
    assert "in nats per token" in table.note
    compared = Comparison("x", {"local": [results["local"]], "fedavg": [result(a=9, b=8)]})
    assert compared.summary()[0]["drift"] == 1.5
    assert "drift" not in compared.summary()[1]
    shown_table = compared.table()
    column = shown_table.columns.index("drift")
    assert [row[column] for row in shown_table.rows] == ["1.50", ""]
    assert "in nats per token" in shown_table.note
    assert "drift" not in run_table({"local": result(a=10)}).markdown()


def test_a_runs_table_of_answers_shows_one_figure_in_per_cent() -> None:
    results = {"local": answered(a=0.5, b=1), "fedavg": answered(a=0.25, b=0.8306)}
    table = run_table(results)
    assert table.title == "Each client's model on its own test text: accuracy (%)"
    assert table.rows == [
        ["a", "50.00", "25.00"],
        ["b", "100.00", "83.06"],
        ["mean", "75.00", "54.03"],
        ["worst client", "50.00 (a)", "25.00 (a)"],
        ["std over clients", "35.36", "41.05"],  # of 50 and 100: 25 times the square root of 2
    ]
    assert (table.note, table.narrower) == ("Higher is better.", None)
    assert run_table(results, asked="rouge_l").rows[0] == ["a", "25.00", "12.50"]
    assert run_table(results, asked="perplexity").rows[0] == ["a", "1.50 / 0.150", "1.25 / 0.125"]
    mixed = results | {"other": result(a=3, b=5)}  # one method has no accuracy
    assert run_table(mixed).rows[0] == ["a", "1.50 / 0.150", "1.25 / 0.125", "3.00 / 0.300"]


def test_a_comparison_of_answers_ranks_the_most_first() -> None:
    local = [answered(a=0.5, b=0.5), answered(a=0.7, b=0.9)]
    results = {"local": local, "fedavg": [answered(a=0.75, b=0.85)]}
    comparison = Comparison("x", results)
    assert [row["rank"] for row in comparison.summary()] == [2, 1]
    table = comparison.table()
    spread = ["mean (std)", "worst client", "over clients", "rank"]
    assert table.columns == ["method", "a", "b", *spread]
    own = ["60.00 (14.14)", "70.00 (28.28)"]
    assert table.rows[0] == ["local", *own, "65.00 (21.21)", "60.00 (a)", "± 7.07", "2"]
    assert "Higher is better." in table.note
    assert [row["rank"] for row in Comparison("x", results, asked="perplexity").summary()] == [1, 2]


def served(outcome: dict, perplexity: float) -> dict:
    """Return a result whose server has a model of its own."""
    return outcome | {"server": {"perplexity": perplexity, "bits_per_byte": perplexity / 10}}


def test_a_server_with_a_model_is_a_row_that_no_mean_counts() -> None:
    results = {"local": result(a=10, b=20), "fedmkt": served(result(a=8, b=16), 2)}
    table = run_table(results)
    assert table.rows[2:] == [
        ["mean", "15.00 / 1.500", "12.00 / 1.200"],
        ["worst client", "20.00 / 2.000 (b)", "16.00 / 1.600 (b)"],
        ["server", "", "2.00 / 0.200"],
    ]
    assert table.note == "Lower is better. The mean excludes the server."
    assert run_table({"local": results["local"]}).note == "Lower is better."
    accuracies = answered(a=0.5, b=1)
    both = {"fedmkt": accuracies | {"server": {**accuracies["trained"]["a"], "accuracy": 0.9}}}
    assert run_table(both).rows[-2:] == [["std over clients", "35.36"], ["server", "90.00"]]
    # What is shown is what the server has too.
    assert run_table({"fedmkt": served(accuracies, 2)}).rows[-1] == ["server", "2.00 / 0.200"]


def test_a_comparison_has_each_model_s_spread_over_seeds_beside_a_server() -> None:
    servers = [served(result(a=8, b=16), 2), served(result(a=10, b=16), 5)]
    results = {"local": [result(a=10, b=20), result(a=14, b=20)], "fedmkt": servers}
    local, fedmkt = Comparison("x", results).summary()
    assert local["server"] is None
    std = pytest.approx(3 / math.sqrt(2))  # of 2 and 5
    assert fedmkt["server"] == {"perplexity": 3.5, "std": std, "seeds": 2}
    assert fedmkt["clients_std"] == {"a": pytest.approx(math.sqrt(2)), "b": 0}
    assert fedmkt["perplexity"] == 12.5  # the mean over clients alone
    table = Comparison("x", results).table()
    heads = ["mean (std)", "worst client", "bits/byte", "rank", "server"]
    assert table.columns == ["method", "a", "b", *heads]
    own = ["12.00 (2.83)", "20.00 (0.00)"], ["9.00 (1.41)", "16.00 (0.00)"]
    assert table.rows == [
        ["local", *own[0], "16.00 (1.41)", "20.00 (b)", "1.600", "2", ""],
        ["fedmkt", *own[1], "12.50 (0.71)", "16.00 (b)", "1.250", "1", "3.50 (2.12)"],
    ]
    assert "Lower is better. Mean and rank exclude the server." in table.note
    once = Comparison("x", {method: runs[:1] for method, runs in results.items()}).table()
    assert once.rows[1] == ["fedmkt", "8.00", "16.00", "12.00", "16.00 (b)", "1.200", "1", "2.00"]
    alone = Comparison("x", {"local": results["local"]}).table()
    assert (alone.columns[-1], alone.rows[0][1]) == ("rank", "12.00 (2.83)")


def test_figures_are_never_cut_or_wrapped_however_many_there_are() -> None:
    figures = [f"{1000 + n}.25" for n in range(12)]
    table = Table("T", ["method", *(f"lexicographer-{n}" for n in range(12))], [["m", *figures]])
    lines = shown(table)
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert [word for word in words if word in figures] == figures
    assert words.count("m") > 1  # each part names its rows
    assert len(shown(table, width=400)) == 5  # one part where there is room


def test_text_is_wrapped_within_the_screen() -> None:
    table = Table("T", ["key", "meaning"], [["a", "many words " * 20]])
    assert max(map(len, shown(table))) <= 80
    assert " ".join(shown(table)).split().count("many") == 20


def test_markup_in_a_cell_is_only_text() -> None:
    assert "[bold]x[/]" in " ".join(shown(Table("T", ["a"], [["[bold]x[/]"]])))
    assert "| [b] |" in Table("T", ["a"], [["[b]"]]).markdown()


def test_a_comparison_under_way_says_how_many_seeds_each_method_has() -> None:
    results = {"local": [result(a=10), result(a=14)], "fedavg": [result(a=8)]}
    lines = shown(Comparison("x", results).table())
    assert "12.00 (2.83)" in lines[4]
    assert "8.00 " in lines[5]
    assert "(" not in lines[5]
    assert "1 to 2 seeds" in lines[1]
