"""Gives the compiler's own pages back once kernels are made. They are clean pages of a file: whoever needs them again reads them again.

How many of LLVM's 130 MB a few touches map is up to the system, and depends on how the file was read: on a fresh machine it is most
of them. A worker that only runs kernels needs next to none.
"""

import ctypes
import sys
from collections.abc import Iterable, Iterator

_DONT_NEED = 4  # MADV_DONTNEED


def give_back_compiler_pages() -> None:
    """Only on Linux; elsewhere, and where the system will not, nothing happens."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as maps:
        pages = list(clean_pages_of("libllvmlite", maps))
    for start, size_bytes in pages:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), _DONT_NEED)


def clean_pages_of(library: str, maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Address and size of each part of the library that is as its file has it: the loader writes addresses into the others.

    `maps` are the lines of /proc/self/smaps: each mapping begins with `start-stop permissions offset device inode path`.
    """
    part: tuple[int, int] | None = None
    for line in maps:
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):
            is_fixed = len(fields) == 6 and library in fields[5] and "w" not in fields[1]
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            part = (start, stop - start) if is_fixed else None
        elif part is not None and fields[0] == "Anonymous:" and fields[1] == "0":
            yield part
