"""The figure of scores that tables show, and its format."""

import pytest

from coterie.engines.rounds import score_summary as progress_note
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.metrics import metric_named, metric_of
from coterie.evaluation.perplexity import PERPLEXITY

TEXT = {"perplexity": 12.3456, "bits_per_byte": 1.0}
CHOSEN = TEXT | {"samples": 3, "accuracy": 0.83064}
WRITTEN = TEXT | {"samples": 3, "exact_match": 0.5, "rouge_l": 0.25}


@pytest.mark.parametrize(
    ("scores", "asked", "key"),
    [
        ([], None, "perplexity"),
        ([], "exact_match", "exact_match"),
        ([TEXT, TEXT], None, "perplexity"),
        ([CHOSEN, CHOSEN | WRITTEN], None, "accuracy"),
        ([WRITTEN, WRITTEN], None, "rouge_l"),
        ([CHOSEN, WRITTEN], None, "perplexity"),
        ([CHOSEN | WRITTEN, WRITTEN], None, "rouge_l"),
        ([CHOSEN | WRITTEN], "exact_match", "exact_match"),
        ([CHOSEN | WRITTEN], "perplexity", "perplexity"),
        ([CHOSEN], "exact_match", "accuracy"),  # nobody has what is asked for
    ],
)
def test_what_suits_every_score_is_shown(scores, asked, key) -> None:
    assert metric_of(scores, asked) is metric_named(key)


def test_shares_are_per_cent_and_more_of_them_is_better() -> None:
    assert (PERPLEXITY.cell(12.3456), ACCURACY.cell(0.83064)) == ("12.35", "83.06")
    assert (PERPLEXITY.label, metric_named("rouge_l").label) == ("perplexity", "ROUGE-L (%)")
    assert sorted([0.2, 0.9, 0.5], key=ACCURACY.order) == [0.9, 0.5, 0.2]
    assert sorted([2, 9, 5], key=PERPLEXITY.order) == [2, 5, 9]
    assert (PERPLEXITY.better, ACCURACY.better) == ("Lower is better.", "Higher is better.")


@pytest.mark.parametrize(
    ("score", "note"), [(TEXT, "test perplexity 12.35  "), (CHOSEN, "test accuracy 83.06 %  ")]
)
def test_progress_tells_the_same_figure(score, note, config) -> None:
    run = config(method="fedavg")
    line = {"round": 0, "client": "poet", "name": f"test/{run.method.reports}", "value": score}
    assert progress_note(run, 0, [line, {"name": "seconds", "value": 3}]) == note
    assert progress_note(run, 0, []) == ""
    late = f"{note.strip()} after round 1  "  # scored at the start of the second
    assert progress_note(run, 1, [{**line, "during": 1}]) == late
    last = {**line, "round": 1, "value": {**score, "perplexity": 99.0, "accuracy": 0.1}}
    alone = progress_note(run, 1, [last])
    assert progress_note(run, 1, [last, {**line, "during": 1}]) == alone != late
