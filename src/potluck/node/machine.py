"""What this machine can give: memory for layers, and how fast it reads them."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from potluck.core.errors import BadRequest
from potluck.core.memory import memory_available_bytes, memory_total_bytes
from potluck.core.processors import usable_cores

_SHARE = 0.75  # of what is free at the start; the rest is the owner's
_PROBE_BYTES = 64 << 20
_MOST_THREADS = 8  # measured on 16 cores with a small model, in tokens/s: 1 thread 205, 2 299, 4 362, 8 427, 15 387
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE | re.ASCII)


def whole_cores() -> int:
    """Usable ones; where two threads share a core, it counts once."""
    return min(usable_cores(), psutil.cpu_count(logical=False) or usable_cores())


def computing_threads() -> int:
    """For a worker that was not told: a core stays for the daemon and the owner, and memory is not read faster by more than a few."""
    return max(1, min(whole_cores() - 1, _MOST_THREADS))


def memory_budget_bytes(asked_bytes: int | None, usual_most_bytes: int) -> int:
    """For weights and KV: what was asked for, but never more than there is; unasked a share of what is free, up to the usual most."""
    if asked_bytes is not None:
        return min(asked_bytes, memory_total_bytes())
    return min(int(memory_available_bytes() * _SHARE), usual_most_bytes)


def parse_size(text: str) -> int:
    """`4GB`, `500 MB`, `1.5g`. Raises BadRequest."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadRequest(f'"{text}" is not a size like 4GB or 500MB')
    return int(float(match[1]) * _UNITS[match[2].lower()])


def reading_bytes_per_s(threads: int = 1) -> float:
    """How fast so many threads read memory: about what decoding is bound by. Takes some tens of milliseconds."""
    parts = np.array_split(np.ones(_PROBE_BYTES // 8, np.int64), threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            began_s = time.perf_counter()
            list(pool.map(np.sum, parts))  # numpy lets go of the interpreter meanwhile
            best_s = min(best_s, time.perf_counter() - began_s)
    return _PROBE_BYTES / best_s
