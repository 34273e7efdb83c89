"""A file mapped into memory, read-only: nothing is copied, and pages come in only when touched. Knows no format."""

import contextlib
import mmap
import stat
from pathlib import Path

from potluck.core.errors import BadModelFile


class MappedFile:
    """One open mapping. Views that were handed out keep their pages alive after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        self.size_bytes = len(self.data)
        self._view = memoryview(self.data)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        return self._view[offset : offset + size_bytes]

    def forget(self, offset: int, size_bytes: int) -> None:
        """These bytes will not be read soon: their pages need not stay resident. Reading them again is only slower."""
        if hasattr(self.data, "madvise"):  # Windows has none
            start = offset - offset % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, offset + size_bytes - start)

    def close(self) -> None:
        self._view.release()
        # Somebody may still hold a view; the mapping then goes away with the last of them.
        with contextlib.suppress(BufferError):
            self.data.close()

    def __repr__(self) -> str:
        return f"<MappedFile {self.path.name} {self.size_bytes} bytes>"


def _map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        # Checked before opening, because opening a pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode):
            raise BadModelFile(path, "file", "is not a regular file")
        if status.st_size == 0:
            raise BadModelFile(path, "file", "is empty")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: emptied or cut since we looked
        raise BadModelFile(path, "file", f"cannot be read: {error}") from error
