from multiprocessing import get_context
from pathlib import Path

from coterie.files import append_line, write_bytes

SIZE = 200_000


def _write_often(path: Path, byte: int) -> None:
    for _ in range(60):
        write_bytes(path, bytes([byte]) * SIZE)


def test_of_processes_that_write_at_once_one_stays_whole(tmp_path):
    path = tmp_path / "table.md"
    spawn = get_context("fork")
    writers = [spawn.Process(target=_write_often, args=(path, byte)) for byte in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert path.read_bytes() in (b"\1" * SIZE, b"\2" * SIZE)
    assert [found.name for found in tmp_path.iterdir()] == ["table.md"]


def test_a_line_is_added_whole_to_what_there_is(tmp_path):
    path = tmp_path / "lines"
    append_line(path, "one")
    assert path.read_text() == "one\n"
    path.write_text("one\ntwo")  # without a line break at its end
    append_line(path, "three")
    assert path.read_text() == "one\ntwo\nthree\n"
    assert list(tmp_path.iterdir()) == [path]
