"""Bounds on this process's address space, so that a fault of ours is a MemoryError and not the end of the machine."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


@contextmanager
def little_more_memory(extra_bytes: int) -> Iterator[None]:
    """Within, the process may take so much more address space than it has; without /proc, as much as it likes."""
    if not _STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(_STATM.read_text().split()[0]) * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
