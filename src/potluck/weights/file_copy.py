"""Hashing and copying of large files in pieces, with progress. Never holds a file in memory; knows no model format."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from potluck.core.errors import BadRequest, DownloadFailed
from potluck.weights import host_files
from potluck.weights.progress import Progress

PIECE_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20  # what a download leaves free for everybody else on this disk


def sha256_of(path: Path, progress: Progress, what: str) -> str:
    digest = hashlib.sha256()
    progress.start(what, path.stat().st_size)
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            progress.advance(len(piece))
    progress.finish()
    return digest.hexdigest()


def git_blob_sha1_of(path: Path) -> str:
    """The name git gives to this content; hubs state it for files that are too small for large-file storage."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def copy_file(source: Path, target: Path, progress: Progress) -> str:
    """Copies through a clone where the file system can, byte by byte otherwise; returns the copy's SHA-256."""
    if host_files.clone(source, target):
        return sha256_of(target, progress, f"checking {source.name}")
    digest = hashlib.sha256()
    progress.start(f"copying {source.name}", source.stat().st_size)
    with open(source, "rb") as reading, open(target, "wb") as writing:
        while piece := reading.read(PIECE_BYTES):
            writing.write(piece)
            digest.update(piece)
            progress.advance(len(piece))
        writing.flush()
        os.fsync(writing.fileno())
    progress.finish()
    return digest.hexdigest()


def link_file(source: Path, target: Path, progress: Progress) -> str:
    """Makes `target` another name of `source` and returns the SHA-256; only works within one file system."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        raise BadRequest(f"cannot link {source} into the store ({error.strerror}); pull it without --link") from None
    return sha256_of(target, progress, f"checking {source.name}")


@contextlib.contextmanager
def file_faults(advice: str = "mend that and run the same command again") -> Iterator[None]:
    """A full disk, a folder that may not be written: the user's to mend, so said in the user's words."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise DownloadFailed(f"{error.strerror or error}{place}; {advice}") from error


def require_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise DownloadFailed(
            f"{needed_bytes + _SPARE_BYTES:,} bytes are needed in {folder} and {free:,} are free; "
            "remove something (`potluck remove ID`) or set POTLUCK_HOME to a larger disk"
        )
