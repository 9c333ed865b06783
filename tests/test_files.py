from multiprocessing import get_context
from pathlib import Path

import pytest

from coterie.files import append_line, parse_json, write_bytes

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
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]


def test_a_line_is_added_whole_to_what_there_is(tmp_path):
    path = tmp_path / "lines"
    append_line(path, "one")
    assert path.read_text() == "one\n"
    path.write_text("one\ntwo")  # without a line break at its end
    append_line(path, "three")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("one\ntwo\nthree\n", [path])


@pytest.mark.parametrize("text", ["[" * 601 + "]" * 601, '{"a":' * 601 + "1" + "}" * 601])
def test_json_that_is_nested_too_deeply_is_refused_by_every_python(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(form)


def test_brackets_in_strings_and_beside_each_other_are_not_nested() -> None:
    assert parse_json('["' + '[\\"{' * 2000 + '"]') == ['["{' * 2000]
    assert parse_json("[" + "[],{}," * 2000 + "1]")[-1] == 1
    assert parse_json("[" * 600 + "]" * 600)
