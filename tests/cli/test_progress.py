"""What a run shows while it works."""

import io

from rich.console import Console

from coterie.cli.progress import ConsoleProgress
from coterie.runs import RunStart

NAMES = ("lexicographer", "poet", "diarist", "whaler")


def follow(progress: ConsoleProgress, losses: bool, *adapters: str) -> None:
    progress.on_run_begin(RunStart("comigs-1g1s", 2, 0, NAMES[:1], 1000, adapters, 2, 0))
    for round in range(2):
        if losses:
            progress.on_metric(round, "lexicographer", "loss/experts", 4.5)
            progress.on_metric(round, "lexicographer", "bytes/up", 10)
        progress.on_client_end(round, "lexicographer")
        progress.on_round_end(round, "test perplexity 90.00  " if round == 1 else "")
    progress.on_run_end(None)


def plain(losses: bool) -> list[str]:
    out = io.StringIO()
    follow(ConsoleProgress(Console(file=out, width=40)), losses)
    return out.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_per_round() -> None:
    title, first, second = plain(losses=True)
    assert title == "comigs-1g1s: 2 rounds, 1 client"
    assert first.startswith("comigs-1g1s: round 1/2  loss 4.500  ")
    assert first.endswith("tokens/s  0:00:00 left")
    assert second.endswith("tokens/s  took 0:00:00  test perplexity 90.00")


def test_a_method_that_trains_nothing_has_no_line_without_news() -> None:
    last = "comigs-1g1s: round 2/2  took 0:00:00  test perplexity 90.00"
    assert plain(losses=False)[1:] == [last]


def test_a_second_run_has_a_bar_of_its_own_and_repeats_no_adapter() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=80, force_terminal=True, color_system=None))
    for _ in range(2):
        follow(progress, True, "rank 8 on 4 layers")
    assert out.getvalue().count("rank 8 on 4 layers") == 1
    assert progress.live.tasks == []
    assert not progress.live.live.is_started


def test_on_a_terminal_everything_fits_in_a_line() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=80, force_terminal=True, color_system=None))
    progress.on_run_begin(RunStart("comigs-1g1s", 20, 3, NAMES, 4000, (), 20, 3))
    progress.on_metric(3, "lexicographer", "loss/experts", 4.5)
    shown = Console(width=200, file=(text := io.StringIO()))
    shown.print(progress.live.get_renderable())
    progress.live.refresh()
    progress.on_run_end(None)
    (line,) = text.getvalue().rstrip().splitlines()
    assert len(line.rstrip()) <= 80
    assert "comigs-1g1s" in line
    assert "4/20 lexicograp loss 4.500" in line
    assert "tokens/s" in line
    assert line.rstrip().endswith("left")
