"""One score for a run wherever it is shown, and short forms of results."""

import pytest

import coterie
from coterie.analysis.experiments import MEAN, experiments
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.messages import Json
from coterie.report.curves import _last
from coterie.runs import Callback


def test_table_figure_and_progress_show_the_kept_models_score(values, tmp_path) -> None:
    notes: list[str] = []
    last: dict[str | None, float] = {}

    class Notes(Callback):
        def on_round_end(self, round: int, scores: str) -> None:
            notes.append(scores)

        def on_metric(self, round: int, client: str | None, name: str, value: Json) -> None:
            if name == "test/trained":
                last[client] = value["perplexity"]  # of the last round, at the end

    config = values(method="local", rounds=3, evaluation={"every": 1, "keep": "best"})
    config["training"] = {**config.get("training", {}), "learning_rate": 0.5}
    done = coterie.run(config, out=tmp_path / "run", callbacks=[Notes()])
    scores = done.results["local"]["trained"].values()
    mean = sum(score["perplexity"] for score in scores) / len(scores)
    [experiment] = experiments([tmp_path / "run"])
    assert _last(experiment)[MEAN].tolist() == pytest.approx([mean])
    shown = PERPLEXITY.cell(mean)
    assert shown in done.table().rows[-2][1]
    shown_last = PERPLEXITY.cell(sum(last.values()) / len(last))
    assert shown != shown_last
    assert notes[-1].strip() == f"test perplexity {shown} (last round {shown_last})"
    assert len(repr(done)) < 200
    assert shown in done._repr_html_()
