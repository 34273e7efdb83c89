"""Files that only their owner may read: whole or not at all, one writer at a time. Knows nothing of what is in them.

The only module in this package that asks which system it runs on.
"""

import contextlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOCK_PAUSE_S = 0.01


def privacy_complaint(path: Path, status: os.stat_result) -> str | None:
    """What is wrong with a file that ought to be one's own and nobody else's."""
    if sys.platform == "win32":  # permission bits mean nothing there; the profile's folder is private
        return None
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if status.st_mode & 0o077:
        return f"can be read by others (mode {status.st_mode & 0o777:o}). Make a new one, or if nobody did: chmod 600 {path}"
    return None


def replace_private(path: Path, data: bytes) -> None:
    """Writes the file, mode 0600, in one step that survives a power cut: whoever reads sees the old one or the new one."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def locked(path: Path, patience_s: float) -> Iterator[None]:
    """Holds the lock file `path`. Raises TimeoutError. The kernel drops the lock of a holder that dies; the empty file stays."""
    with open(path, "a+b", opener=_private_opener) as file:
        deadline_s = time.monotonic() + patience_s
        while not _try_lock(file):
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            time.sleep(_LOCK_PAUSE_S)
        yield


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
