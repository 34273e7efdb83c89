"""What the membership wants done, and what it has to tell. Values only."""

from dataclasses import dataclass, field
from typing import Literal

from potluck.wire.effects import SendTo

EventKind = Literal["joined", "lost", "returned", "left", "expelled", "duplicate", "refused"]


@dataclass(frozen=True)
class Event:
    """`node`: whom it is about; for "refused" the record's signer. `reason` is the counter's name there, words elsewhere."""

    kind: EventKind
    node: bytes
    reason: str = ""


@dataclass(frozen=True)
class Dial:
    """Make a link to a node at one of these addresses, tried in order; `node` None: to whoever answers there."""

    node: bytes | None
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Cut the links to a node."""

    node: bytes
    reason: str


Effect = SendTo | Dial | Drop


@dataclass
class Outcome:
    """To be carried out in order."""

    effects: list[Effect] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
