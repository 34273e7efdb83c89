"""What operating systems do differently with processes. The only module of the worker that asks which one it runs on."""

import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Linux: the kernel kills this process when the thread that started it ends, even while it is stopped.

    Elsewhere (and before this call) the closed socket ends the worker, as soon as it runs.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave_interrupts_to_parent() -> None:
    """Ctrl-C reaches every process of a terminal; the daemon decides what becomes of its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end(status: int) -> NoReturn:
    """Ends the process from any thread, at once: kernels in other threads cannot be asked to stop."""
    sys.stderr.flush()
    os._exit(status)
