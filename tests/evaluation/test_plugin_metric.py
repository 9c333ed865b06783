"""A metric in a file of one's own: examples/distinct2.py in runs, tables and reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import coterie
from coterie import CoterieError
from coterie.analysis.comparison import Comparison
from coterie.analysis.experiments import experiments
from coterie.analysis.significance import Difference, differences
from coterie.config import plugins
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.data.measured import Measured
from coterie.evaluation import evaluate as evaluation
from coterie.evaluation.metrics import METRICS, metric_named
from coterie.report.curves import Curves
from coterie.report.figures import FIGURES
from coterie.report.page import write_report
from coterie.runs import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "distinct2.py"
NAMES = ("diarist", "poet", "whaler")


@pytest.fixture
def loaded(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(METRICS, "registered", {})
    load_plugin(EXAMPLE)
    yield
    monkeypatch.setattr(plugins, "_loaded", {})


@pytest.fixture
def run(values, answering):
    """Make a run that generates answers and shows the metric."""

    def make(**changes):
        evaluation = {"generate": 6, "metric": "distinct-2", "keep": "last"}
        return parse(values(**{**answering, "rounds": 1, "evaluation": evaluation, **changes}))

    return make


def naive(text: str) -> float | None:
    words, seen, count = text.split(), [], 0
    for place in range(1, len(words)):
        pair = words[place - 1 : place + 1]
        seen += [] if pair in seen else [pair]
        count += 1
    return len(seen) / count if count else None


def test_it_counts_bigrams(loaded) -> None:
    texts = ["a b a b a", "one two three", "the the the the", "word", "", "x  y\nx y x"]
    none = torch.zeros(len(texts))
    scores = metric_named("distinct-2").score(Measured(none, none, texts, texts))
    assert scores == list(map(naive, texts)) == [2 / 4, 1, 1 / 3, None, None, 2 / 4]


def test_runs_tables_and_reports_show_it(loaded, run, tmp_path, monkeypatch) -> None:
    written: list[list[str]] = []
    generate = evaluation.gated_answers

    def kept(*arguments):
        written.append([f"{text} {text} c" for text in generate(*arguments)])
        return written[-1]

    monkeypatch.setattr(evaluation, "gated_answers", kept)
    done = coterie.run(run(method="local"), out=tmp_path / "local")
    clients = NAMES
    scores = done.results["local"]["trained"]
    outcome = RunFolder(done.path).outcome
    assert outcome is not None
    for name, texts in zip(clients, written, strict=True):
        values = [value for value in map(naive, texts) if value is not None]
        assert scores[name]["distinct-2"] == pytest.approx(sum(values) / len(values))
        assert outcome["items"]["trained"][name]["distinct-2"] == list(map(naive, texts))
        assert {"accuracy", "exact_match", "rouge_l"} <= scores[name].keys()
    table = done.table()
    assert "distinct-2 (%)" in table.title
    assert table.rows[0] == [clients[0], f"{100 * scores[clients[0]]['distinct-2']:.2f}"]
    assert RunFolder(done.path).description["plugins"]["metric distinct-2"]["file"] == str(EXAMPLE)

    comparison = Comparison("c", {"local": [outcome], "again": [outcome]}, asked="distinct-2")
    assert "distinct-2 (%)" in comparison.table().title
    difference = differences({"a": [outcome], "b": [outcome]}, "a", comparison.metric)["b"]
    assert isinstance(difference, Difference)
    assert difference.value == 0

    [experiment] = experiments([done.path])
    assert experiment.metric is metric_named("distinct-2")
    monkeypatch.setattr(FIGURES, "builtin", {"curves": lambda: Curves})
    page = write_report([done.path], tmp_path / "report").page.read_text(encoding="utf-8")
    assert "distinct-2" in page


def test_the_code_of_a_metric_is_part_of_the_run(loaded, run, monkeypatch, tmp_path) -> None:
    digest = run().digest()
    assert run(evaluation={"generate": 6}).digest() != digest
    changed = tmp_path / "mine.py"
    changed.write_text(EXAMPLE.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    monkeypatch.setattr(METRICS, "registered", {})
    load_plugin(changed)
    assert run().digest() != digest


def test_an_unknown_metric_is_refused_with_the_nearest(run) -> None:
    with pytest.raises(CoterieError, match=r"no metric 'rogue_l'. Did you mean 'rouge_l'\?"):
        run(evaluation={"metric": "rogue_l"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluation": {"metric": "distinct-2"}}, "distinct-2` scores generated answers"),
        ({"data": {"window": 48}}, "needs answers; set data.instructions"),
    ],
)
def test_what_a_metric_needs_is_asked_for(loaded, run, changes, sentence) -> None:
    with pytest.raises(CoterieError, match=sentence):
        run(**changes)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("name = 'loss'\n    title = 'x'", "A metric named 'loss' already exists"),
        ("name = 'accuracy'\n    title = 'x'", "A metric named 'accuracy' already exists"),
        ("name = 'X y'\n    title = 'x'", "needs a `name` of lower-case letters"),
        ("name = 'x'", "The metric 'x' needs a `title`"),
    ],
)
def test_a_metric_without_a_proper_name_is_refused(body, sentence, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import coterie\nclass M(coterie.Metric):\n    {body}\n", encoding="utf-8")
    with pytest.raises(CoterieError, match=sentence):
        load_plugin(file)
