"""What the membership wants done, and what it has to tell. Values only."""

from typing import Literal

import msgspec

from potluck.wire.effects import SendTo

EventKind = Literal["joined", "lost", "returned", "left", "expelled", "duplicate", "refused"]


class Event(msgspec.Struct, frozen=True):
    """`node`: whom it is about; for "refused" the record's signer. `reason` is the counter's name there, words elsewhere."""

    kind: EventKind
    node: bytes
    reason: str = ""


class Dial(msgspec.Struct, frozen=True):
    """Make a link to a node at one of these addresses, tried in order; `node` None: to whoever answers there."""

    node: bytes | None
    addresses: tuple[str, ...]


class Drop(msgspec.Struct, frozen=True):
    """Cut the links to a node."""

    node: bytes
    reason: str


Effect = SendTo | Dial | Drop


class Outcome(msgspec.Struct):
    """To be carried out in order."""

    effects: list[Effect] = []
    events: list[Event] = []
    has_dials: bool = False
