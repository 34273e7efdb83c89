"""Sessions come and go: which there are, which have ended lately, and which have left their KV for a next request.

Opens, ends and parks them, at the worker as well; does not know what is computed in between.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

from potluck.shard.batching import Batches
from potluck.shard.effects import Effects
from potluck.shard.outbox import Outbox
from potluck.shard.parked import ParkedSessions
from potluck.shard.residency import Residency
from potluck.shard.sessions import ClosedSessions, Phase, ShardSession
from potluck.shard.settings import ShardSettings, objection
from potluck.wire.messages import Close, Open, Opened, Refused
from potluck.wire.work import CloseSession, OpenSession, ParkSession, SessionOpened, SessionRefused

RowBytes = Callable[[str, int, int], int]


class Lifecycle:
    """`live`: the sessions that there are, oldest first."""

    def __init__(
        self, settings: ShardSettings, row_bytes: RowBytes, effects: Effects, outbox: Outbox, residency: Residency,
        batches: Batches, counters: Counter[str],
    ) -> None:  # fmt: skip
        self.live: OrderedDict[bytes, ShardSession] = OrderedDict()
        self.closed = ClosedSessions()
        self.closed_early = ClosedSessions()  # before they were opened; by head, who alone can have meant them
        self.parked = ParkedSessions(settings.parked_sessions)
        self.is_draining = False
        self._unanswered: set[bytes] = set()  # closed before the worker has answered their opening, which it still owes
        self._settings, self._row_bytes, self._counters = settings, row_bytes, counters
        self._effects, self._outbox, self._residency, self._batches = effects, outbox, residency, batches

    def __repr__(self) -> str:
        return f"<Lifecycle {len(self.live)} live, {self.parked!r}>"

    @property
    def is_answer_owed(self) -> bool:
        """Whether the worker has yet to answer an opening."""
        return bool(self._unanswered) or any(session.phase is Phase.OPENING for session in self.live.values())

    # ------------------------------------------------------------ opening

    def open(self, sender: bytes, message: Open, now_s: float) -> None:
        known = self.live.get(message.session)
        has_been = any(message.session in each for each in (self.closed, self._unanswered, self.parked))
        if has_been or sender + message.session in self.closed_early or (known is not None and known.head == sender):
            self._counters["duplicate_open"] += 1
            return
        # What was opened and closed at once is still work: without counting it, a head could make any amount of that.
        streams = len(self.live) + len(self._unanswered)
        problem = objection(message, self._settings, streams, is_known=known is not None)
        if self.is_draining and problem is None:
            problem = "shard_unavailable", "this shard is being given up"
        if problem is not None:
            self._counters[f"refused_{problem[0]}"] += 1
            if known is None:
                self.closed.add(message.session)  # a copy of it that comes late must not be taken when there is room
            self._effects.send(sender, None, Refused(message.session, message.epoch, *problem))
            return
        session = ShardSession.of(message, sender)
        if self.parked.resumable(message, sender):
            session.resumes, session.resumed = message.resumes, message.resumed
        session.used_s = now_s
        session.input_row_bytes = self.row_size(session.input_codec)
        self.live[session.id] = session
        if self._residency.is_loaded:
            self.open_in_worker(session)
        else:
            self._residency.postpone(session)

    def open_in_worker(self, session: ShardSession) -> None:
        self._effects.work(
            OpenSession(
                session.id, session.stage, session.positions, session.boundaries, session.sampler, session.resumes,
                session.resumed,
            )
        )  # fmt: skip

    def _activate(self, session: ShardSession, length: int, now_s: float) -> None:
        session.phase = Phase.ACTIVE
        session.used_s = now_s
        session.length_in = session.length_out = length
        if session.keeps_outbox and not session.stage.has_output:
            if length and session.resumes is not None:
                self._outbox.adopt(session.id, session.resumes, length, self.row_size(session.output_codec))
            else:
                self._outbox.open(session.id)
        self._effects.send(session.head, None, Opened(session.id, session.epoch, length))

    def on_worker_answer(self, message: SessionOpened | SessionRefused, now_s: float) -> None:
        self._unanswered.discard(message.session)
        session = self.live.get(message.session)
        if session is None or session.phase is not Phase.OPENING:
            return  # closed meanwhile; the worker has been told
        if isinstance(message, SessionOpened):
            self._activate(session, message.length, now_s)
        else:
            self.refuse(session, message.code, message.message)

    def refuse(self, session: ShardSession, code: str, text: str) -> None:
        if self.forget(session):
            self._effects.send(session.head, None, Refused(session.id, session.epoch, code, text))

    def row_size(self, codec: str | None) -> int:
        """Bytes of one position, as it travels; None: a token."""
        return 4 if codec is None else self._row_bytes(codec, 1, self._settings.hidden_size)

    # ------------------------------------------------------------ ending

    def close(self, session: ShardSession, message: Close, now_s: float) -> None:
        """Ends a session; where its head may come back to it, what it has computed stays with the worker for a while."""
        length = min(message.keeps, session.length_out)
        if length == 0 or self.is_draining or session.phase is not Phase.ACTIVE:
            return self.drop(session, now_s)
        del self.live[session.id]
        self.closed.add(session.id)
        self._batches.drop(session.id)
        self._outbox.truncate(session.id, length, self.row_size(session.output_codec))
        self._effects.work(ParkSession(session.id, length))
        self._residency.idle_since_s = now_s
        for parked in self.parked.put(session, length, now_s):
            self.unpark(parked)
        return None

    def unpark(self, session: bytes) -> None:
        self.parked.remove(session)
        self._outbox.close(session)
        self._effects.work(CloseSession(session))

    def forget_worker(self) -> None:
        """The worker that had them is gone, and answers nothing any more."""
        self._unanswered.clear()
        for session in self.parked.all():
            self.parked.remove(session)
            self._outbox.close(session)

    def drop(self, session: ShardSession, now_s: float) -> None:
        if not self.forget(session):
            return
        if not self._residency.withdraw(session):
            if session.phase is Phase.OPENING:
                self._unanswered.add(session.id)
            self._effects.work(CloseSession(session.id))
        self._residency.idle_since_s = now_s

    def forget(self, session: ShardSession) -> bool:
        """Takes a session off every table; False where it was gone already."""
        if self.live.pop(session.id, None) is None:
            return False
        self.closed.add(session.id)
        self._batches.drop(session.id)
        self._outbox.close(session.id)
        return True
