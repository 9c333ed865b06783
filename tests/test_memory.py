"""The size of the main memory."""

import psutil
import pytest

from coterie import memory


@pytest.mark.parametrize(
    ("limit", "limited"), [("1000000\n", True), ("max\n", False), ("9" * 20, False), (None, False)]
)
def test_a_container_s_limit_counts_as_its_memory(limit, limited, tmp_path, monkeypatch) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", file)
    assert memory.main_memory() == (1_000_000 if limited else psutil.virtual_memory().total)
