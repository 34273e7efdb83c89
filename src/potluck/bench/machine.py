"""This machine: its processor's name, and what others do with its cores."""

import platform
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Linux says it in a file; elsewhere the platform's own short name has to do."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def foreign_load(interval_s: float = 0.5) -> float:
    """How many cores other programs keep busy, seen while we sleep."""
    import psutil

    busy: float = sum(psutil.cpu_percent(interval_s, percpu=True)) / 100
    return busy
