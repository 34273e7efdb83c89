"""Where all tests keep what is made once per machine: the models, and the compiled kernels, which nodes that tests start share."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

HOME = Path(os.environ.get("POTLUCK_TEST_HOME") or Path.home() / ".cache" / "potluck-tests")


def share_kernels() -> None:
    """To be called before anything of the engine is imported."""
    os.environ.setdefault("POTLUCK_CACHE", str(HOME / "cache"))


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """One process at a time makes what is made once; the others wait, and find it."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
