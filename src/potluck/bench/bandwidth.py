"""How fast this machine reads memory: the ceiling for decoding, which reads every weight once per token."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.engine.system_memory import in_large_pages, private_memory

ARRAY_BYTES = 512 << 20  # far more than any cache
_STREAMS = 8  # read side by side: one stream alone does not keep the prefetchers busy (measured: 10 against 15 GB/s)


@functools.cache
def _summing_kernel() -> Callable[[npt.NDArray[np.int64]], int]:
    import numba

    def total(rows: Any) -> int:
        result = 0
        for column in range(rows.shape[1]):
            for stream in range(_STREAMS):
                result += rows[stream, column]
        return result

    kernel: Callable[[npt.NDArray[np.int64]], int] = numba.njit("int64(int64[:,::1])", nogil=True)(total)
    return kernel


def read_bandwidth(threads: int, rounds: int = 5, size_bytes: int = ARRAY_BYTES) -> float:
    """Bytes per second that `threads` threads read together, each from its own part; the best round, as it is a ceiling."""
    words = size_bytes // 8 // (threads * _STREAMS)
    parts = [_part(words) for _ in range(threads)]
    return max(sum(part.nbytes for part in parts) / _seconds(parts) for _ in range(rounds))


def _part(words: int) -> npt.NDArray[np.int64]:
    """In large pages, as weights are: through small ones less can be read, and it would not be the ceiling."""
    part = np.frombuffer(in_large_pages(private_memory(_STREAMS * words * 8)), np.int64).reshape(_STREAMS, words)
    part[:] = 1  # or all of it would be the same page of zeros
    return part


def _seconds(parts: list[npt.NDArray[np.int64]]) -> float:
    kernel = _summing_kernel()
    helpers = [threading.Thread(target=kernel, args=(part,)) for part in parts[1:]]
    start = time.perf_counter()
    for helper in helpers:
        helper.start()
    kernel(parts[0])
    for helper in helpers:
        helper.join()
    return time.perf_counter() - start
