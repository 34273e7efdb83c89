"""Sessions that were closed and whose keys and values are kept for a while, for one that begins in the same way.

Nothing is promised: the longest unused goes where its room is needed. Who may resume what, and for how long, is the daemon's business.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from potluck.core.errors import OutOfKvMemory
from potluck.engine.shard_engine import ShardEngine
from potluck.worker.session import WorkerSession

Opened = TypeVar("Opened")
_SHARE = 4  # a fourth of the KV budget at the most


class KeptSessions:
    """By the ids that they had; the one that was used last stands last."""

    def __init__(self, kv_budget_bytes: int) -> None:
        self._most_bytes = kv_budget_bytes // _SHARE
        self._sessions: OrderedDict[bytes, tuple[WorkerSession, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KeptSessions {len(self._sessions)}, {self._used_bytes() >> 20} MiB>"

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, session_id: bytes, session: WorkerSession) -> None:
        session.chooser = None
        self._sessions[session_id] = session, session.engine.trim(session.number)
        while self._used_bytes() > self._most_bytes:
            self._drop_oldest()

    def get(self, session_id: bytes) -> WorkerSession | None:
        if session_id not in self._sessions:
            return None
        self._sessions.move_to_end(session_id)
        return self._sessions[session_id][0]

    def close(self, session_id: bytes) -> None:
        kept = self._sessions.pop(session_id, None)
        if kept is not None:
            kept[0].close()

    def close_those_of(self, engine: ShardEngine) -> None:
        for session_id in [key for key, (session, _) in self._sessions.items() if session.engine is engine]:
            self.close(session_id)

    def give_way(self, attempt: Callable[[], Opened]) -> Opened:
        """What `attempt` returns; where it lacks KV memory, after as many kept sessions as necessary were given up."""
        while True:
            try:
                return attempt()
            except OutOfKvMemory:
                if not self._sessions:
                    raise
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.close(next(iter(self._sessions)))

    def _used_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._sessions.values())
