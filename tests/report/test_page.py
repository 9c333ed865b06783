"""The report of real runs: one page that needs nothing but itself, and its files."""

import re
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
from drawing import drawn
from rich.console import Console

import coterie
import coterie.cli
from coterie.analysis.experiments import chosen_layers, experiments
from coterie.analysis.texts import _beginning, _pieces, coloured_texts
from coterie.config.run import parse
from coterie.data.examples import Examples
from coterie.data.items import Instruction
from coterie.data.kinds.text import Tokens
from coterie.federation.participants import gathered
from coterie.report.cost import Traffic
from coterie.report.figures import FIGURES
from coterie.report.page import write_report
from coterie.report.style import LeftOut
from coterie.report.texts import TextPicture, texts
from coterie.report.trust import Trust
from coterie.runs import RunFolder


@pytest.fixture(scope="module")
def runs(values, tmp_path_factory) -> Path:
    """Two methods, evaluated every round."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("comigs-1g1s", "fedavg"):
        coterie.run(values(method=method, rounds=2, evaluation={"every": 1}), out=folder / method)
    return folder


def opening(runs: Path) -> str:
    """Return the beginning of the diarist's test text."""
    config = parse(RunFolder(runs / "fedavg").description["config"])
    words = coterie.tokenizer(runs / "fedavg")
    return str(words.decode(gathered(config, words).clients[0].data.test.ids[:12]))


@pytest.mark.slow
def test_a_page_needs_nothing_but_itself(runs, tmp_path) -> None:
    report = write_report([runs], tmp_path)
    html = report.page.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|@import|https?:|url\(", html)
    sources = re.findall(r'(?:src|srcset|href)="([^"]{0,30})', html)
    assert sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    pictures = [picture for section in report.sections for picture in section.pictures]
    assert html.count("<picture>") == len(pictures)
    assert html.count("<img") == len(re.findall(r'<img alt="[^"]+"', html))
    names = {picture.name for picture in pictures}
    assert {"perplexity", "loss", "routing-comigs-1g1s", "traffic", "flops"} <= names
    kinds = [f"{name}-{theme}.{kind}" for name in names for theme in ("light", "dark")
             for kind in ("png", "svg")]  # fmt: skip
    assert sorted(path.name for path in report.figures.iterdir()) == sorted(kinds)


def test_the_same_runs_give_the_same_page(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(FIGURES, "builtin", {"traffic": lambda: Traffic})
    first, other = (write_report([runs / "fedavg"], tmp_path / name) for name in "ab")
    assert first.page.read_bytes() == other.page.read_bytes()


def test_a_page_lists_who_learns_with_whom(written, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(FIGURES, "builtin", {"trust": lambda: Trust})
    row = {"anna": 0.6, "ben": 0.4}
    for seed in range(2):
        figures = [(1, "anna", "trust", row), (1, "ben", "trust", {"ben": 1.0})]
        written(f"us/auto-{seed}", {"name": "auto"}, seed, figures, (10.0 + seed, 20.0))
        written(f"us/local-{seed}", {"name": "local"}, seed)
    html = write_report([tmp_path / "us"], tmp_path).page.read_text(encoding="utf-8")
    sentence = "anna learns with ben (0.40); test perplexity the same as alone"
    assert f"<ul><li>{sentence}</li><li>ben learns alone</li></ul>" in html
    assert "The list describes the run with the smallest seed." in html


@pytest.mark.slow
def test_texts_are_shown_only_where_asked_for(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(FIGURES, "builtin", {})

    def shown(path: Path) -> str:
        return unescape(re.sub("<[^>]+>", "", path.read_text(encoding="utf-8")))

    words = opening(runs)
    with_texts = write_report([runs], tmp_path, with_texts=True, layer="2")
    text = shown(with_texts.page)
    clients = [f"{client}'s model" for client in ("diarist", "poet", "whaler")]
    for part in (
        words,
        "This page contains clients' texts",
        "a generalist, layer 2 of 2",
        *clients,
    ):
        assert part in text
    assert "layer 1 of 2" not in text
    assert list(with_texts.figures.glob("texts-*"))
    without = write_report([runs], tmp_path)
    assert words not in shown(without.page)
    assert not list(without.figures.glob("texts-*"))  # those of before are gone


def test_a_model_reads_only_texts_in_its_own_tokens(values, other, tmp_path) -> None:
    run = values(method="comigs-2s", rounds=1, bases={"poet": other}, evaluation={"keep": "last"})
    coterie.run(run, out=tmp_path / "run")
    (experiment,) = experiments([tmp_path / "run"])
    shown = [p for p in texts(coloured_texts(experiment, "first")) if isinstance(p, TextPicture)]
    all_read = [r for picture in shown for row in picture.texts.values() for r in row.values()]
    read = {(each.model_of, each.text_of): each for each in all_read}
    assert len(read) == len(all_read)
    assert read.keys() == {
        ("diarist", "diarist"), ("diarist", "whaler"), ("poet", "poet"),
        ("whaler", "diarist"), ("whaler", "whaler"),
    }  # fmt: skip
    whole = (Path(run["data_root"]) / "poet.txt").read_text(encoding="utf-8")
    shown = "".join(piece for piece, _ in read["poet", "poet"].pieces)
    assert len(shown) > 80
    assert shown in whole  # read with the poet's tokenizer, not with the run's


def test_a_folders_texts_stand_in_place_of_the_clients(values, tmp_path) -> None:
    run = values(method="comigs-1g1s", rounds=1, evaluation={"keep": "last"})
    coterie.run(run, out=tmp_path / "run")
    (experiment,) = experiments([tmp_path / "run"])
    (tmp_path / "mine").mkdir()
    (nothing,) = texts(coloured_texts(experiment, "last", tmp_path / "mine"))
    assert isinstance(nothing, LeftOut)
    assert "no .txt files" in nothing.why
    words = {"ode": "I sing of arms.", "note": "Buy bread."}
    for name, text in words.items():
        (tmp_path / "mine" / f"{name}.txt").write_text(text)
    (grid,) = texts(coloured_texts(experiment, "last", tmp_path / "mine"))
    assert isinstance(grid, TextPicture)
    assert (list(grid.texts), grid.columns) == (["note", "ode"], ["diarist", "poet", "whaler"])
    for model in grid.columns:
        for name, text in words.items():
            assert "".join(piece for piece, _ in grid.texts[name][model].pieces) == text
    assert [row[0] for row in grid.table.rows] == ["note", "ode"]
    drawn([grid])


def test_layers_are_named_or_numbered() -> None:
    named = {None: [0, 2, 5], "first": [0], "middle": [2], "last": [5], "4": [3]}
    assert {layer: chosen_layers(layer, 6) for layer in named} == named
    for layer in ("0", "7", "lowest"):
        with pytest.raises(coterie.CoterieError, match="from 1 to 6"):
            chosen_layers(layer, 6)


def test_pieces_are_the_text_and_whole_characters(runs) -> None:
    words = coterie.tokenizer(runs / "fedavg")
    text = "I sing 𝄞, naïve\n and electric."
    ids = words(text)["input_ids"]
    pieces = list(_pieces(words, ids, list(range(len(ids)))))
    assert "".join(piece for piece, _ in pieces) == text
    assert len(pieces) < len(ids)  # the clef is several tokens
    assert "\ufffd" not in "".join(piece for piece, _ in pieces)


def test_prompts_with_answers_are_read_one_by_one() -> None:
    lengths = torch.tensor([70, 90, 40])
    items = (Instruction("q", "a"),) * 3
    ids, sizes = torch.arange(200, dtype=torch.int32), torch.ones(3, dtype=torch.int64)
    parts = _beginning(Examples(ids, torch.ones(200).bool(), lengths, lengths - 5, sizes, items), 7)
    assert [(int(p[0]), len(p) - 1) for p in parts] == [(0, 69), (70, 21)]  # 90 but for firsts
    (text,) = _beginning(Tokens(torch.arange(200, dtype=torch.int32), 9), 7)
    assert text.tolist() == [7, *range(90)]


def command(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["coterie", "report", *map(str, arguments)])
    for name in ("console", "errors"):
        monkeypatch.setattr(coterie.cli.terminal, name, Console(width=80, stderr=name == "errors"))
    with pytest.raises(SystemExit) as end:
        coterie.cli.main()
    return int(end.value.code or 0)


def test_the_command_says_what_it_wrote_and_left_out(runs, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(FIGURES, "builtin", {"traffic": lambda: Traffic, "trust": lambda: Trust})
    assert command(monkeypatch, runs / "fedavg", "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "  omitted: Trust weights: no run recorded trust weights" in out
    assert f"Report: {tmp_path / 'report.html'}" in out
    assert "contains clients' texts" not in out
    monkeypatch.setattr(FIGURES, "builtin", {})
    assert command(monkeypatch, runs, "--out", tmp_path, "--texts", "--layer", "9") == 0
    out = capsys.readouterr().out
    assert "--layer '9' is invalid: give first, middle, last or a number from 1 to 2" in out
    assert "This page contains clients' texts" in out


def test_errors_are_one_sentence(tmp_path, monkeypatch, capsys) -> None:
    assert command(monkeypatch, tmp_path) == 2
    assert "neither a run folder nor a folder of runs" in capsys.readouterr().err
    assert command(monkeypatch, tmp_path / "table.json") == 2
    assert "is not a folder; give run folders, or folders of run folders" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith("coterie.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(monkeypatch, tmp_path) == 2
    assert "pip install 'coterie[report]'" in capsys.readouterr().err
