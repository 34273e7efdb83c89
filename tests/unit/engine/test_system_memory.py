"""Weights lie in large pages whoever else reads their file: asked of the system itself, where it has large pages for files."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from potluck.engine.system_memory import in_large_pages, read_in_large_pages

MEGABYTE = 1 << 20
SIZE = 16 * MEGABYTE


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return in_large_pages(mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ))


def in_large(memory: mmap.mmap) -> int:
    """How many bytes of a mapping are in large pages, as the system counts."""
    begin = f"{np.frombuffer(memory, np.uint8).ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text(errors="replace").splitlines())
    next(line for line in lines if line.startswith(begin))
    words = next(line.split() for line in lines if line.startswith("FilePmdMapped:"))
    return int(words[1]) << 10


@pytest.fixture
def unread(tmp_path: Path) -> Path:
    """A file of which nothing is in memory, on a system that would read it in large pages."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("large pages are asked for in this way on Linux")
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    forget(path)
    alone = mapped(path)
    for offset in range(0, SIZE, 2 * MEGABYTE):
        alone[offset]
    has_large_pages = in_large(alone) == SIZE
    alone.close()
    if not has_large_pages:
        pytest.skip("this system has no large pages for files here")
    forget(path)
    return path


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_file_that_another_has_begun_to_read_comes_in_large_pages_all_the_same(unread: Path) -> None:
    other, memory = mapped(unread), mapped(unread)
    other[0]  # two large pages are there now, and the second is marked for `other` to read on
    read_in_large_pages(memory)
    assert in_large(memory) == SIZE
    memory.close()
    other.close()


def test_it_is_the_whole_file_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    content = os.urandom(SIZE)
    path.write_bytes(content)
    memory = mapped(path)
    read_in_large_pages(memory)
    assert memory[:] == content
    memory.close()
