"""The size of the main memory."""

import platform
import subprocess
import sys

import psutil
import pytest

from coterie import memory

LIMITS = [("1000000\n", True), ("max\n", False), ("9" * 20, False), (None, False)]


@pytest.mark.parametrize(("limit", "limited"), LIMITS)
def test_a_container_s_limit_counts_as_its_memory(limit, limited, tmp_path, monkeypatch) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    assert memory.main_memory() == (1_000_000 if limited else psutil.virtual_memory().total)


def test_a_container_s_free_memory_includes_file_pages(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("900000")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 250000\n")
    assert memory.free_memory() == 350_000
    (tmp_path / "memory.current").write_text("1300000")  # the limit was lowered
    assert memory.free_memory() == 0


def test_a_system_s_free_memory_is_what_it_can_give(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    assert memory.free_memory() == psutil.virtual_memory().total // 2  # it is unknown
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:     123 kB\nHugePages: 0\n")
    assert memory.free_memory() == 123 * 1024


FREES = """
import psutil, torch
from coterie.memory import return_freed_memory
return_freed_memory()
def resident():
    return psutil.Process().memory_info().rss
torch.zeros(2**16) + 1
before = resident()
tensors = [torch.ones(2**16 + 1) for _ in range(800)]
assert resident() - before > 190 * 2**20
del tensors[:-1]
assert resident() - before < 20 * 2**20, resident() - before
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_tensors_are_returned_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", FREES], check=True)
