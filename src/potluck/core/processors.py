"""How many of the machine's cores are ours to use."""

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = _QUOTA) -> int:
    """Those that this process may run on, and no more than its control group is paid for: a container may see 64 and have two."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, _quota_cores(quota_file) or cores)


def _quota_cores(file: Path) -> int | None:
    """Linux writes `200000 100000`, microseconds of a period, or `max 100000`; None where there is no such limit."""
    try:
        quota_us, period_us = file.read_text().split()
        return max(1, math.ceil(int(quota_us) / int(period_us)))
    except (OSError, ValueError, ZeroDivisionError):  # not Linux, an older hierarchy, or no limit
        return None
