"""The figure and the table of the samples that sides learnt from each other."""

import numpy as np
import pytest
from drawing import drawn

from coterie.analysis.experiments import experiments
from coterie.report.curves import Curves
from coterie.report.style import THEMES, Canvas, LeftOut, Picture
from coterie.report.teaching import Teaching

FEDMKT = {"name": "fedmkt"}


def lesson(after: int, samples: int, positions: float = 0.5, mass: float = 0.25, **by: int):
    values = {"loss": 1.0, "samples": samples, "positions": positions, "mass": mass}
    return {"after": after, **values} | ({"by": by} if by else {})


FIGURES = [
    # The first round: nobody has told clients anything.
    (0, None, "taught", lesson(0, 5, 0.75, anna=2, ben=3)),
    # Anna is scored, learns for that, and learns as much again when the next round begins.
    (0, "anna", "taught", lesson(1, 9)),
    (1, "anna", "taught", lesson(1, 4, 1.0, 0.5)),
    (1, "ben", "taught", lesson(1, 0, 0.0, 0.0)),
    (1, None, "taught", lesson(1, 1, anna=1, ben=0)),
    (1, "anna", "taught", lesson(2, 6)),
    (1, "ben", "taught", lesson(2, 7)),
]


@pytest.fixture
def mutual(written):
    """Two rounds, and a public set of eight samples."""

    def write(figures=FIGURES, method=FEDMKT, public=8):
        server = {"samples": {"train": public}} if public else None
        (experiment,) = experiments([written("run", method, figures=figures, served=server)])
        return experiment

    return write


def heights(picture: Picture):
    """Return the bottoms and tops of bars, and the points of lines, by client."""
    bars, lines = picture.draw(Canvas(THEMES[0])).axes
    pieces = {
        str(group.get_label()): [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in group]
        for group in bars.containers
    }
    named = [line for line in lines.lines if not str(line.get_label()).startswith("_")]
    return pieces, {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in named}


def test_bars_are_stacked_by_client_and_lines_are_each_clients(mutual) -> None:
    picture = drawn(Teaching().pictures(mutual()))
    pieces, points = heights(picture)
    assert pieces == {"anna": [(0, 2), (0, 1)], "ben": [(2, 5), (1, 1)]}
    assert points == {"anna": [[1, 4], [2, 6]], "ben": [[1, 0], [2, 7]]}
    assert "all 8 public samples" in picture.caption


def test_the_table_has_the_quality_of_what_came_over(mutual) -> None:
    table = drawn(Teaching().pictures(mutual())).table
    assert table.columns[3] == "samples (of 8)"
    assert table.rows == [
        ["1", "server", "anna 2, ben 3", "5", "75.0%", "25.0%"],
        ["1", "anna", "server", "4", "100.0%", "50.0%"],
        ["1", "ben", "server", "0", "", ""],
        ["2", "server", "anna 1, ben 0", "1", "50.0%", "25.0%"],
        ["2", "anna", "server", "6", "50.0%", "25.0%"],
        ["2", "ben", "server", "7", "50.0%", "25.0%"],
    ]


@pytest.mark.parametrize(("sides", "panels"), [("server", 1), ("clients", 1), ("both", 2)])
def test_a_side_that_recorded_nothing_has_no_panel(sides, panels, mutual) -> None:
    wanted = {"server": (True,), "clients": (False,), "both": (True, False)}[sides]
    figures = [figure for figure in FIGURES if (figure[1] is None) in wanted]
    picture = drawn(Teaching().pictures(mutual(figures, public=None)))
    assert len(picture.draw(Canvas(THEMES[0])).axes) == panels
    assert "Dotted" not in picture.caption


def test_a_long_run_shows_ten_of_its_rounds(mutual) -> None:
    figures = [(r, None, "taught", lesson(r, 1, anna=1)) for r in range(30)]
    shown = [int(row[0]) for row in drawn(Teaching().pictures(mutual(figures))).table.rows]
    assert (len(shown), shown[0], shown[-1]) == (10, 1, 30)


def test_runs_in_which_nobody_teaches_say_so(mutual) -> None:
    (left_out,) = Teaching().pictures(mutual([], {"name": "local"}))
    assert isinstance(left_out, LeftOut)
    assert "distillation between a server and its clients" in left_out.why


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_servers_scores_have_a_panel_beside_the_clients(rounds, written, tmp_path) -> None:
    score = {"perplexity": 7.0, "bits_per_byte": 1.0}
    figures = [
        (r, c, name, score)
        for r in range(3 - rounds, 3)
        for c, name in ((None, "server/aggregated"), ("anna", "test/trained"))
    ]
    written("runs/fedmkt", FEDMKT, figures=figures)
    written("runs/local", {"name": "local"})  # has no server's model, and no panel is the worse
    (experiment,) = experiments([tmp_path / "runs"])
    panels = drawn([next(iter(Curves().pictures(experiment)))]).draw(Canvas(THEMES[0])).axes
    assert [axis.get_title() for axis in panels] == ["mean over clients", "anna", "ben", "server"]
    assert any(7.0 in np.asarray(line.get_xydata()) for line in panels[-1].lines)
