"""What the parts of a node's gossip find while one input is handled: collected here, and taken out at its end. No I/O."""

from collections.abc import Iterable

from potluck.swarm.events import Dial, Drop, Event, EventKind, Outcome
from potluck.wire.effects import SendTo
from potluck.wire.messages import Message

_MAX_EVENTS = 256  # in one outcome


class Findings:
    """`changes` goes up whenever a view would look different."""

    def __init__(self) -> None:
        self.changes = 0
        self._heard: dict[bytes, None] = {}
        self._outcome = Outcome()

    def __repr__(self) -> str:
        return f"<Findings {self.changes} changes, {len(self._outcome.effects)} effects waiting>"

    def send(self, node: bytes, message: Message) -> None:
        self._outcome.effects.append(SendTo(node, None, message))

    def dial(self, node: bytes, addresses: tuple[str, ...]) -> None:
        self._outcome.effects.append(Dial(node, addresses))
        self._outcome.has_dials = True

    def drop(self, node: bytes, reason: str) -> None:
        self._outcome.effects.append(Drop(node, reason))

    def tell(self, kind: EventKind, node: bytes, reason: str = "") -> None:
        if len(self._outcome.events) < _MAX_EVENTS:
            self._outcome.events.append(Event(kind, node, reason))

    def heard_of(self, node: bytes) -> None:
        """It said something new, or is back."""
        self._heard[node] = None

    @property
    def has_heard(self) -> bool:
        return bool(self._heard)

    def take_heard(self) -> Iterable[bytes]:
        """Whom there was news of since the last call."""
        heard, self._heard = self._heard, {}
        return heard

    def take(self) -> Outcome:
        outcome, self._outcome = self._outcome, Outcome()
        return outcome
