"""Which closed sessions the worker still has keys and values of: whose they were, and until when. Pure; time comes in."""

from collections import OrderedDict
from typing import NamedTuple

from potluck.wire.messages import Resume


class _Kept(NamedTuple):
    head: bytes
    until_s: float


class KeptSessions:
    """A few of them, for whoever opened them and nobody else. `put` and `take_…` return those that the worker is to let go of."""

    def __init__(self, most: int, keep_s: float) -> None:
        self._most, self._keep_s = most, keep_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the one that was used last stands last

    def __repr__(self) -> str:
        return f"<KeptSessions {len(self._kept)} of at most {self._most}>"

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, session: bytes, head: bytes, now_s: float) -> list[bytes]:
        self._kept[session] = _Kept(head, now_s + self._keep_s)
        return [self._kept.popitem(last=False)[0] for _ in range(len(self._kept) - self._most)]

    def may_resume(self, resume: Resume | None, head: bytes, now_s: float) -> bool:
        """Whether it is kept for that head; using it prolongs its time."""
        kept = self._kept.get(resume.session) if resume is not None else None
        if resume is None or kept is None or kept.head != head:
            return False
        self._kept[resume.session] = _Kept(head, now_s + self._keep_s)
        self._kept.move_to_end(resume.session)
        return True

    def take_expired(self, now_s: float) -> list[bytes]:
        return self._take([session for session, kept in self._kept.items() if kept.until_s <= now_s])

    def take_those_of(self, head: bytes) -> list[bytes]:
        return self._take([session for session, kept in self._kept.items() if kept.head == head])

    def clear(self) -> None:
        """The worker has lost them all."""
        self._kept.clear()

    def _take(self, sessions: list[bytes]) -> list[bytes]:
        for session in sessions:
            del self._kept[session]
        return sessions
