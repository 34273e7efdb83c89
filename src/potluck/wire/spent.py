"""What a step cost in each shard that it has been through, for the head's breakdown. No I/O.

Eight bytes for each, whatever the times are, so that the length of a step's frame is known before the times are (foreseen.py).
"""

import struct
from typing import Annotated, NamedTuple

from msgspec import Meta

MAX_STAGES = 64

_ENTRY = struct.Struct("<II")
_MOST_US = (1 << 32) - 1  # more than an hour; longer is told as that
SPENT_BYTES = _ENTRY.size

SpentByStage = Annotated[bytes, Meta(max_length=MAX_STAGES * SPENT_BYTES)]


class Spent(NamedTuple):
    """Computing, and the rest of the time from a step's arrival in a shard to its output."""

    compute_us: int
    queue_us: int


def stages_in(spent: bytes) -> int:
    return len(spent) // SPENT_BYTES


def add_spent(before: bytes, compute_us: int, queue_us: int) -> bytes:
    """`before`, with one shard more. Of what came before, no more than there is room for is kept, and whole entries only."""
    entry = _ENTRY.pack(min(max(compute_us, 0), _MOST_US), min(max(queue_us, 0), _MOST_US))
    return before[: min(stages_in(before), MAX_STAGES - 1) * SPENT_BYTES] + entry


def read_spent(spent: bytes) -> tuple[Spent, ...]:
    """By shard. Bytes at the end that are no whole entry tell nothing."""
    whole = spent[: stages_in(spent) * SPENT_BYTES]
    return tuple(Spent(*entry) for entry in _ENTRY.iter_unpack(whole))
