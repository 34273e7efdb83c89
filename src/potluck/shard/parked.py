"""Sessions that have ended and whose KV was left for the next request with the same beginning. Pure bookkeeping, bounded.

Only the head that opened a session can resume it, with the same stage and the same rounding. Where the KV lies is the worker's business,
which may give it up at any time: whoever resumes is told how much was left.
"""

from collections import OrderedDict
from dataclasses import dataclass

from potluck.shard.sessions import ShardSession
from potluck.wire.messages import Boundary, Open, Stage


@dataclass(frozen=True)
class ParkedSession:
    head: bytes
    stage: Stage
    boundaries: tuple[Boundary, ...]
    length: int
    since_s: float


class ParkedSessions:
    """Oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parked: OrderedDict[bytes, ParkedSession] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ParkedSessions {len(self._parked)} of {self._most}>"

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, session: bytes) -> bool:
        return session in self._parked

    def put(self, session: ShardSession, length: int, now_s: float) -> list[bytes]:
        """Those that are one too many now."""
        self._parked[session.id] = ParkedSession(session.head, session.stage, session.boundaries, length, now_s)
        excess = max(0, len(self._parked) - self._most)
        return list(self._parked)[:excess]

    def belongs_to(self, session: bytes, head: bytes) -> bool:
        parked = self._parked.get(session)
        return parked is not None and parked.head == head

    def resumable(self, message: Open, head: bytes) -> bool:
        """Whether an OPEN from `head` may begin with what the session that it names has left."""
        parked = None if message.resumes is None else self._parked.get(message.resumes)
        if parked is None or parked.head != head or not 0 < message.resumed <= parked.length:
            return False
        return (parked.stage, parked.boundaries) == (message.stage, message.boundaries)

    def expired(self, now_s: float, lifetime_s: float) -> list[bytes]:
        return [session for session, parked in self._parked.items() if now_s - parked.since_s >= lifetime_s]

    def of(self, head: bytes) -> list[bytes]:
        return [session for session, parked in self._parked.items() if parked.head == head]

    def remove(self, session: bytes) -> None:
        self._parked.pop(session, None)

    def all(self) -> list[bytes]:
        return list(self._parked)
