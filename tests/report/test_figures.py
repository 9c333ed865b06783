"""Figures show what the runs measured, in colours that everybody can tell from the page."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from drawing import drawn

from coterie.analysis.experiments import Experiment, experiments
from coterie.analysis.tables import Table
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.methods.registry import available
from coterie.report.assignment import Assignment, holdings, shared
from coterie.report.cost import Traffic
from coterie.report.curves import Curves, Sweep, smooth
from coterie.report.division import Division
from coterie.report.figures import FIGURES, ReportFigure
from coterie.report.plots import of_pairs
from coterie.report.routing import Routing
from coterie.report.style import FIXED, THEMES, Canvas, LeftOut, Picture, looks
from coterie.report.trust import Trust, trust_matrices
from coterie.report.uploads import Uploads

LOCAL = {"name": "local"}
COMIGS = {"name": "comigs-1g1s", "mlp": {"generalists": 1, "specialists": {"anna": 2, "others": 1}}}


def only(path) -> Experiment:
    (experiment,) = experiments([path])
    return experiment


def shown(figure: type[ReportFigure], folder: Path) -> Table:
    """Return the table of a figure with one picture."""
    return table_of(figure().pictures(only(folder)))


def table_of(pictures) -> Table:
    table = drawn(pictures).table
    assert table is not None
    return table


def test_perplexity_over_rounds_is_the_point_that_the_method_reports(written) -> None:
    figures = [
        (round, client, f"test/{point}", {"perplexity": base * (4 - round) + extra})
        for round in range(3)
        for client, base in (("anna", 10), ("ben", 30))
        for point, extra in (("trained", 1), ("aggregated", 500))
    ]
    folder = written("run", LOCAL, figures=figures, perplexities=(11, 31))
    perplexity, loss = Curves().pictures(only(folder))
    assert table_of([perplexity]).rows == [["local", "81.00", "61.00", "41.00", "21.00"]]
    assert isinstance(loss, LeftOut)


KEPT = "The summary table lists the scores of the kept models"


@pytest.mark.parametrize("kept", [{}, {"anna": 1, "ben": 3}], ids=["last", "best"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_alternative_text_says_which_score_is_where(kept, rounds, written) -> None:
    scores = [(r, {"perplexity": 40.0 - r}) for r in range(rounds)]
    figures = [(r, client, "test/trained", s) for r, s in scores for client in ("anna", "ben")]
    folder = written("run", LOCAL, figures=figures[:-2], perplexities=(11, 31))
    if rounds == 1:
        line = {"round": 3, "name": "test/trained", "value": {"perplexity": 50.0}}
        lines = (json.dumps({**line, "client": client}) for client in ("anna", "ben"))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | ({"kept": kept} if kept else {})))
    pictures: Any = Curves().pictures(only(folder))
    picture, _ = pictures
    if rounds > 1:
        assert "The table lists the mean over clients by round." in picture.alt
        assert (KEPT in picture.alt) == (KEPT in picture.caption) == bool(kept)
    else:
        end = "of the kept models" if kept else "after the last round"
        assert drawn([picture]).title == f"Test perplexity {end}"
        assert f"Dot plot of perplexity {end} for local" in picture.alt
        assert "The summary table lists the values." in picture.alt


def test_accuracy_is_drawn_in_per_cent_and_the_best_is_the_highest(written, tmp_path) -> None:
    for name, accuracies in (("local", (0.5, 0.75)), ("fedavg", (0.9, 0.8))):
        score = {"perplexity": 9.0, "samples": 4, "accuracy": 0.1}
        begun = [(0, client, "test/trained", score) for client in ("anna", "ben")]
        written(f"cmp/{name}", {"name": name}, figures=begun, accuracies=accuracies)
    experiment = only(tmp_path / "cmp")
    assert (experiment.metric, experiment.instructed) == (ACCURACY, True)
    accuracy, _ = Curves().pictures(experiment)
    assert drawn([accuracy]).title == "Test accuracy (%) over rounds"
    assert table_of([accuracy]).rows == [["local", "10.00", "62.50"], ["fedavg", "10.00", "85.00"]]
    assert "logarithmic" not in drawn([accuracy]).caption
    assert "Higher is better" in drawn([accuracy]).caption


def test_a_run_says_which_figure_is_drawn(written) -> None:
    asked = {"every": None, "split": "test", "metric": "perplexity"}
    assert only(written("run", LOCAL, accuracies=(0.5, 0.6), evaluation=asked)).metric is PERPLEXITY


@pytest.fixture
def assigned(written):
    """Two rounds, two layers, three clients; the last round is not over on the second layer."""
    assignments = [
        [{"anna": [0, 1], "ben": [1], "carl": [3]}, {"anna": [0], "ben": [0], "carl": [2]}],
        [{"anna": [0, 1, 2], "ben": [1, 2], "carl": []}, {"anna": [3], "ben": [3], "carl": [3]}],
        [{"anna": [4], "ben": [4], "carl": [4]}],
    ]
    figures = [
        (round, None, f"assignment/h.{layer}.c_attn", given)
        for round, layers in enumerate(assignments)
        for layer, given in enumerate(layers)
    ]
    return written("run", {"name": "fedamole"}, figures=figures)


def test_assignments_become_who_held_what(assigned) -> None:
    held = holdings(only(assigned).all[0])
    rounds, layers, clients = (held.index.unique(n) for n in ("round", "layer", "client"))
    assert list(clients) == ["anna", "ben", "carl"]
    assert (list(layers), list(rounds)) == (["h.0.c_attn", "h.1.c_attn"], [1, 2])
    assert held.shape == (2 * 2 * 3, 4)
    assert np.flatnonzero(held.loc[(2, "h.0.c_attn", "anna")]).tolist() == [0, 1, 2]
    # Of anna and ben 2 of 3 on the first layer, 1 of 1 on the second; carl holds none on the first.
    expected = [[1, (2 / 3 + 1) / 2, 1 / 2], [(2 / 3 + 1) / 2, 1, 1 / 2], [1 / 2, 1 / 2, 1]]
    assert shared(held.loc[2]).to_numpy() == pytest.approx(np.array(expected))


def test_assignments_are_drawn_with_their_tables(assigned) -> None:
    sets, how_many, common = Assignment().pictures(only(assigned))
    rows = [["anna", "1, 2, 3", "4"], ["ben", "2, 3", "4"], ["carl", "none", "4"]]
    assert table_of([sets]).rows == rows
    rows = table_of([how_many]).rows
    assert rows == [["anna", "1.50", "2.00"], ["ben", "1.00", "1.50"], ["carl", "1.00", "0.50"]]
    assert table_of([common]).rows[0] == ["anna", "1.000", "0.833", "0.500"]


def test_losses_are_counted_by_update_and_averaged_over_clients(written) -> None:
    losses = {"anna": [5.0, 4.0, 3.0], "ben": [7.0, 6.0, 2.0]}
    figures = [(n // 2, c, "loss/joint", v) for c, vs in losses.items() for n, v in enumerate(vs)]
    _, loss = Curves().pictures(only(written("run", LOCAL, figures=figures)))
    assert table_of([loss]).rows == [["local", "joint", "3", "6.000", "2.500"]]
    values = pd.Series([1.0, 2.0, 6.0, 3.0])
    assert smooth(values, 3).tolist() == pytest.approx([1.5, 3, 11 / 3, 4.5])
    assert smooth(values, 4).tolist() == pytest.approx([1.5, 3, 3, 11 / 3])
    assert smooth(values, 9).tolist() == smooth(values, 4).tolist()


def test_expert_scores_have_a_panel_per_client_and_expert(written) -> None:
    weights = {"anna": [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], "ben": [[0.7, 0.3], [0.8, 0.2]]}
    figures = [
        (round, client, f"routing/h.{layer}.mlp", row)
        for layer in range(2)
        for client, rows in weights.items()
        for round, row in enumerate(rows)
    ]
    folder = written("run", COMIGS, figures=figures)
    table = shown(Routing, folder)
    assert [row[:3] for row in table.rows] == [
        ["anna", "generalist", "0.100"],
        ["anna", "specialist 1", "0.600"],
        ["anna", "specialist 2", "0.300"],
        ["ben", "generalist", "0.800"],
        ["ben", "specialist", "0.200"],
    ]
    run = only(folder).all[0]
    assert run.expert_names("anna", 2) == ["expert 1", "expert 2"]  # not what the run says


def test_clients_of_different_bases_have_layers_of_their_own(written) -> None:
    figures = [
        (0, client, f"routing/{layer}", [0.25, 0.75])
        for client, layers in (("anna", ["h.0.mlp", "h.1.mlp"]), ("ben", ["layers.0.mlp"]))
        for layer in layers
    ]
    table = shown(Routing, written("run", COMIGS, figures=figures))
    assert table.columns == ["client", "expert", "1", "2"]
    rows = [["0.250", "0.250"], ["0.750", "0.750"], ["0.250", ""], ["0.750", ""]]
    assert [row[2:] for row in table.rows] == rows


def test_trust_rows_become_matrices_averaged_over_seeds(written, tmp_path) -> None:
    first = [(1, "anna", {"anna": 0.9, "ben": 0.1}), (1, "anna", {"anna": 0.6, "ben": 0.4})]
    rows = [
        [*first, (1, "ben", {"anna": 0.2, "ben": 0.8})],
        [(1, "anna", {"anna": 0.8, "ben": 0.2}), (3, "ben", {"anna": 0.5, "ben": 0.5})],
    ]
    for seed, shares in enumerate(rows):
        figures = [(round, client, "trust", row) for round, client, row in shares]
        written(f"cmp/{seed}", LOCAL, seed, figures=figures)
    second, fourth = trust_matrices(only(tmp_path / "cmp").all).items()
    assert (second[0], fourth[0]) == (2, 4)
    for _, weights in (second, fourth):
        assert list(weights.index) == list(weights.columns) == ["anna", "ben"]
    # Of Anna's two rows in the second round, the later one counts.
    rows = second[1].to_numpy().tolist()
    assert rows == [pytest.approx([0.7, 0.3]), pytest.approx([0.2, 0.8])]
    # Anna keeps hers in both runs; in the first run, ben keeps his, too.
    assert fourth[1].loc["anna"].tolist() == pytest.approx([0.7, 0.3])
    assert fourth[1].loc["ben"].tolist() == pytest.approx([0.35, 0.65])
    heat, lines = Trust().pictures(only(tmp_path / "cmp"))
    assert table_of([heat]).rows == [["anna", "0.700", "0.300"], ["ben", "0.350", "0.650"]]
    drawn([lines])


def test_a_client_without_weights_so_far_has_an_empty_row(written) -> None:
    figures = [(1, "anna", "trust", {"anna": 1.0}), (2, "ben", "trust", {"anna": 0.4, "ben": 0.6})]
    second, third = trust_matrices(only(written("run", LOCAL, figures=figures)).all).values()
    assert second.loc["ben"].isna().all()
    assert third.to_numpy().tolist() == [[1.0, 0.0], [0.4, 0.6]]


def test_panels_of_many_clients_are_large_enough_for_their_names() -> None:
    names = [f"client {n}" for n in range(20)]
    weights = pd.DataFrame(np.eye(20), names, names)
    rounds = {"round 1": weights, "round 2": weights}
    for narrow in (False, True):
        figure = of_pairs(Canvas(THEMES[0], narrow), rounds, 0, 1, "trust weight")
        figure.draw_without_rendering()
        panel, *_ = figure.axes
        assert panel.get_window_extent().height / figure.dpi / len(names) > 0.11


def test_trust_in_others_has_no_diagonal_and_colours_of_its_own(written, tmp_path) -> None:
    row = {"anna": 0.5, "ben": 0.24, "cleo": 0.26}
    figures = [(1, "anna", "trust", row), (1, "ben", "trust", row), (1, "cleo", "trust", row)]
    written("cmp/0", LOCAL, 0, figures=figures)
    pictures = [p for p in Trust().pictures(only(tmp_path / "cmp")) if isinstance(p, Picture)]
    (others,) = [picture for picture in pictures if picture.name.startswith("trust-in-others")]
    # Ben and Cleo trust Anna most.
    assert "lowest weight (0.24) to the highest (0.5)" in others.caption
    drawn([others])


def test_a_sweep_of_the_routers_schedule_is_a_heat_map(written, tmp_path) -> None:
    for every, steps, score in ((5, 1, 10), (5, 2, 20), (9, 1, 30)):
        method = COMIGS | {"router": {"every": every, "steps": steps}}
        written(f"cmp/{every}-{steps}", method, perplexities=(score, score + 2))
    table = shown(Sweep, tmp_path / "cmp")
    assert table.columns[1:] == ["5", "9"]
    assert table.rows == [["1", "11.00", "31.00"], ["2", "21.00", ""]]


def test_division_shows_labels_or_else_tokens(written) -> None:
    sizes = {"train": 900, "validation": 50, "test": 1200}
    tokens = {"anna": {"tokens": sizes}, "ben": {"tokens": sizes}}
    table = shown(Division, written("a", LOCAL, clients=tokens))
    assert (table.columns, table.rows[0]) == (["client", *sizes], ["anna", "900", "50", "1,200"])
    labels = {"anna": {"labels": {"b": 3}}, "ben": {"labels": {"a": 4, "b": 1}}}
    table = shown(Division, written("b", LOCAL, clients=labels))
    assert table.rows == [["anna", "0", "3"], ["ben", "4", "1"]]


def test_traffic_counts_the_first_download_of_a_round(written) -> None:
    # The second one of a round serves the evaluation after the aggregation.
    figures = [
        (round, client, name, size)
        for round in range(2)
        for client, size in (("anna", 1000), ("ben", 3000))
        for name in ("bytes/down", "bytes/up", "bytes/down")
    ]
    table = shown(Traffic, written("run", LOCAL, figures=figures))
    assert table.rows == [["local", "2,000", "3,000", "2,000", "3,000"]]


def test_uploads_have_a_ratio_per_client_and_excluded_ones_are_named(written) -> None:
    def changes(round: int, **ratios: float) -> list[tuple]:
        return [
            (round, client, "change", {"ratio": ratio, "cosine": None if round else 1 - ratio})
            for client, ratio in ratios.items()
        ]

    figures = [
        *changes(0, anna=1.0, ben=1.5),
        *changes(1, anna=1.0, ben=9000.0),
        (1, "ben", "left out", "the change of its adapter is 9e+03 times the round's median"),
        *changes(2, anna=0.0, ben=0.5),
        *changes(3, anna=1.0),
        *((3, client, "left out", "its loss is not finite") for client in ("ben", "carl")),
    ]
    table = shown(Uploads, written("run", LOCAL, figures=figures, perplexities=None))
    rows = [["anna", "1", "0.00", ""], ["ben", "9,000", "-0.50", "2, 4"], ["carl", "", "", "4"]]
    assert table.rows == [["local", *row] for row in rows]


def test_what_runs_do_not_hold_is_left_out(written) -> None:
    empty = only(written("run", LOCAL, perplexities=None))
    for name in FIGURES.names():
        assert all(isinstance(item, LeftOut) for item in FIGURES.get(name)().pictures(empty))


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_every_colour_stands_out_from_the_page(theme) -> None:
    assert all(contrast(colour, theme.paper) >= 3 for colour in theme.colours)
    assert contrast(theme.ink, theme.paper) >= 7
    assert contrast(theme.quiet, theme.paper) >= 4.5


def test_a_method_has_one_colour_and_no_two_labels_look_the_same() -> None:
    styles = looks([*available(), *(f"other-{n}" for n in range(12))])
    assert len({(k.colour, str(k.dash), k.marker) for k in styles.values()}) == len(styles)
    assert all(styles[name].colour == place for name, place in FIXED.items() if name in styles)
    few = looks(["local", "my-own"])
    assert few["local"].colour == styles["local"].colour
    assert few["my-own"].colour not in FIXED.values()
    assert all(a != b for a, b in pairwise(look.colour for look in few.values()))
