"""A tensor as a file describes it, under the file's own name; what the readers yield. Knows no family and no role."""

from pathlib import Path

import msgspec


class SourceTensor(msgspec.Struct, frozen=True):
    """Lies inside its file and overlaps no other. `format` is the file's word; it may be one we cannot compute with."""

    name: str
    format: str
    shape: tuple[int, ...]  # outermost first: a matrix is (rows, columns)
    file: Path
    offset: int  # absolute, in the file
    size_bytes: int


def shown(value: object, limit: int = 80) -> str:
    """A value out of a file, fit for a message: on one line, without control characters, cut short."""
    if isinstance(value, list | dict | tuple):
        return f"a {type(value).__name__} of {len(value)}"  # rendering it could take more room than the file itself
    text = ascii(value[:limit] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown_name(name: str) -> str:
    """The same for a name, without quotation marks."""
    return shown(name)[1:-1]
