"""Memory from the system, and the size of its pages.

A token reads every weight once, in order, so pages matter: on two cores of Zen 4 under a hypervisor one thread reads 18 GB/s through
pages of 4 KB and 30 through pages of 2 MB. Linux has large ones for files too, if these are written in large pieces, or read after it
was told that they are wanted and by one process alone (`read_in_large_pages`).
"""

import contextlib
import mmap

_LARGE_PAGE_BYTES = 2 << 20  # x86's; where they are larger, each is only touched more than once


def private_memory(size_bytes: int) -> mmap.mmap:
    """Zeros. Private mappings that touch are one to the system, which limits their number; shared ones are not."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size_bytes)  # Windows


def in_large_pages(memory: mmap.mmap) -> mmap.mmap:
    """Asks for them, before anything of `memory` is touched. A system that has none says no, and nothing is lost."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_in_large_pages(memory: mmap.mmap) -> None:
    """A file's mapping that `in_large_pages` was told of: brings it in now, large page by large page.

    Left alone, Linux reads two of them and marks the second, so that it reads on when that one is used; but if it is another process
    that uses it first, the rest of the file comes in pages of 16 KB, and stays so (docs/log.md). So here nothing is read ahead. A
    system without large pages of files reads one small page each time, and the others when they are wanted.
    """
    if not hasattr(mmap, "MADV_RANDOM"):
        return
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_RANDOM)
        for offset in range(0, len(memory), _LARGE_PAGE_BYTES):
            memory[offset]
        memory.madvise(mmap.MADV_NORMAL)
