"""What a run shows while it works."""

import io

from rich.console import Console

from coterie.cli.progress import ConsoleWatch


def follow(watch: ConsoleWatch, losses: bool) -> None:
    with watch:
        watch.start("comigs-1g1s", rounds=2, done=0, clients=1, tokens=1000)
        for round in range(2):
            if losses:
                watch.seen("lexicographer", "loss/experts", 4.5)
                watch.seen("lexicographer", "bytes/up", 10)
            watch.worked(round, "lexicographer")
            watch.round_over(round, "test perplexity 90.00  " if round == 1 else "")


def plain(losses: bool) -> list[str]:
    out = io.StringIO()
    follow(ConsoleWatch(Console(file=out, width=40)), losses)
    return out.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_per_round() -> None:
    title, first, second = plain(losses=True)
    assert title == "comigs-1g1s: 2 rounds, 1 client"
    assert first.startswith("comigs-1g1s: round 1/2  loss 4.500  ")
    assert first.endswith("tokens/s  0:00:00 left")
    assert second.endswith("tokens/s  took 0:00:00  test perplexity 90.00")


def test_a_method_that_trains_nothing_has_no_line_without_news() -> None:
    assert plain(losses=False)[1:] == [
        "comigs-1g1s: round 2/2  took 0:00:00  test perplexity 90.00"
    ]


def test_on_a_terminal_everything_fits_in_a_line() -> None:
    out = io.StringIO()
    watch = ConsoleWatch(Console(file=out, width=80, force_terminal=True, color_system=None))
    with watch:
        watch.start("comigs-1g1s", rounds=20, done=3, clients=4, tokens=4000)
        watch.seen("lexicographer", "loss/experts", 4.5)
        shown = Console(width=200, file=(text := io.StringIO()))
        shown.print(watch.live.get_renderable())
        watch.live.refresh()
    (line,) = text.getvalue().rstrip().splitlines()
    assert len(line.rstrip()) <= 80
    assert "comigs-1g1s" in line
    assert "4/20 lexicograp loss 4.500" in line
    assert "tokens/s" in line
    assert line.rstrip().endswith("left")
