"""A program that keeps one core busy while we measure beside it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# It ends by itself some day, in case nobody lives to end it.
_LOOP = "import time\nend = time.monotonic() + float({limit_s})\nwhile time.monotonic() < end: pass"


@contextlib.contextmanager
def busy_core(limit_s: float = 600.0) -> Iterator[int]:
    """Keeps a core busy inside the `with` block; yields the process's id."""
    hog = subprocess.Popen([sys.executable, "-c", _LOOP.format(limit_s=limit_s)])
    try:
        yield hog.pid
    finally:
        hog.kill()
        hog.wait()
