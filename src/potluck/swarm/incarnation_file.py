"""How often a node was started: a number on disk that orders what it says now after all it said before.

Where the file is lost, the swarm still remembers: the node hears its own older adverts and goes beyond them.
"""

import logging
from pathlib import Path

from potluck.swarm.adverts import MAX_COUNT
from potluck.swarm.atomic_file import read_bounded, replace_file

_LOG = logging.getLogger(__name__)
_MAX_FILE_BYTES = 32


def next_incarnation(path: Path) -> int:
    """One more than at the last start, and on disk before it is used. Raises OSError."""
    incarnation = _read(path) + 1
    store_incarnation(path, incarnation)
    return incarnation


def store_incarnation(path: Path, incarnation: int) -> None:
    replace_file(path, f"{incarnation}\n".encode())


def _read(path: Path) -> int:
    data = read_bounded(path, _MAX_FILE_BYTES)
    text = (data or b"0").strip()
    if text.isdigit() and int(text) < MAX_COUNT:
        return int(text)
    _LOG.warning("%s does not hold a number; counting starts again", path)
    return 0
