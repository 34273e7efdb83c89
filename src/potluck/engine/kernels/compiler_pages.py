"""Gives the compiler's own pages back once kernels are made. They are clean pages of a file: whoever needs them again reads them again.

On a fresh machine the kernel maps most of LLVM's 100 MB with a few touches; a worker that only runs kernels needs next to none of it.
"""

import ctypes
import sys

_DONT_NEED = 4  # MADV_DONTNEED


def give_back_compiler_pages() -> None:
    """Only on Linux; elsewhere, and where the system will not, nothing happens."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for start, size_bytes in _code_of("libllvmlite"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), _DONT_NEED)


def _code_of(library: str) -> list[tuple[int, int]]:
    """Address and size of the library's code. Not of its constants: the loader has written addresses into those."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and library in fields[5] and fields[1].startswith("r-x"):
                start, stop = (int(part, 16) for part in fields[0].split("-"))
                found.append((start, stop - start))
    return found
