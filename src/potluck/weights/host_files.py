"""What operating systems do differently with files: locks, copy-on-write clones, making a rename survive a power cut.

The only module in this package that asks which system it runs on. Knows nothing about models.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from potluck.core.errors import BadRequest

_FICLONE = 0x40049409  # Linux: share the extents of another file (Btrfs, XFS, bcachefs)


@contextlib.contextmanager
def exclusive_lock(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file `path`; raises BadRequest(refusal) where another process holds it.

    The kernel drops the lock when its holder dies, so a crash never leaves one behind; the empty file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):  # Unix and Windows say it differently
            raise BadRequest(refusal) from None
        yield


def _lock(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def clone(source: Path, target: Path) -> bool:
    """Makes `target` a copy-on-write clone of `source`; False (and no target) where the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    try:
        with open(source, "rb") as reading, open(target, "wb") as writing:
            fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable. Windows has no such call and needs none: it journals them."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    # Opened for writing because Windows flushes only such handles.
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
