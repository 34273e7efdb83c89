"""What a GPU can do at best: bytes copied and bf16 products per second, on random data, by the clock of its own events."""

import statistics
from collections.abc import Callable

import torch

_COPY_BYTES = 4 << 30
_SIDE = 8192


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` timed runs after three that do not count."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, size_bytes: int = _COPY_BYTES) -> float:
    """Bytes per second, read and written both counted."""
    source = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds(lambda: target.copy_(source), 10)


def matrix_rate(device: torch.device, side: int = _SIDE) -> float:
    """Floating-point operations per second of a large bf16 product."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / seconds(lambda: torch.mm(left, right, out=out), 10)
