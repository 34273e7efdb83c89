"""Small files that are read whole and replaced whole: after a crash either the old content is there or the new."""

from pathlib import Path

from potluck.identity.private_file import replace_private


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """The content; None where there is no such file, or where it is larger than it can rightly be."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    return data if len(data) <= max_bytes else None


def replace_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_private(path, data)
