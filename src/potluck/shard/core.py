"""The shard server's decisions, without I/O: messages, worker replies and losses in; messages and work out.

Whoever drives it (a node on sockets, a test on a simulated network) hands over what happened and carries out the effects in order.
A step whose sender, epoch, position, shape or codec does not fit is refused or dropped and counted, never guessed.
"""

from collections import Counter
from collections.abc import Callable

from potluck.core.remembered import AnswerSoFar
from potluck.shard.batching import Batches, Running
from potluck.shard.effects import Effect, Effects, Remember, Suspect, Work
from potluck.shard.foresight import Foresight
from potluck.shard.lifecycle import Lifecycle, RowBytes
from potluck.shard.outbox import Outbox
from potluck.shard.passing_on import PassingOn
from potluck.shard.rehearsals import Rehearsals
from potluck.shard.residency import Residency
from potluck.shard.sessions import Phase, ShardSession
from potluck.shard.settings import ShardSettings, ShardState
from potluck.wire.messages import (
    Close,
    Credit,
    Message,
    Open,
    Probe,
    Probed,
    Replay,
    Rewire,
    Rewired,
    ShardLost,
    Step,
    Truncate,
)
from potluck.wire.work import (
    BatchDone,
    FromWorker,
    Loaded,
    LoadFailed,
    SessionOpened,
    SessionRefused,
    TruncateSession,
    WorkOutput,
)

__all__ = ["Effect", "Remember", "ShardCore", "ShardSettings", "ShardState", "Suspect", "Work"]


def _ignore(seconds: float) -> None:
    return


class ShardCore:
    """One shard: its sessions, its batches, its worker's state."""

    def __init__(self, node: bytes, settings: ShardSettings, row_bytes: RowBytes) -> None:
        self.node = node
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self.observe: Callable[[float], None] = _ignore  # told how long each step was here, in seconds
        self._effects = Effects()
        self._outbox = Outbox(settings.outbox_budget_bytes)
        self._residency = Residency(settings.stage, self._effects, settings.eviction_idle_s)
        self._batches = Batches(self._effects, self._residency, settings.batch_tokens)
        self._life = Lifecycle(
            settings, row_bytes, self._effects, self._outbox, self._residency, self._batches, self.counters
        )
        self._sessions = self._life.live
        self._passing_on = PassingOn(
            node, self._effects, self._outbox, self._sessions, self.counters, on_own_step=self._on_step,
            replay_rows=settings.replay_rows, row_size=self._life.row_size,
        )  # fmt: skip
        self.foresight = Foresight(node, self._batches, self._residency, self._life)
        self.rehearsals = Rehearsals(node, settings, self._effects, self._batches, self._residency, self._life)

    def __repr__(self) -> str:
        stage = self.settings.stage
        return f"<ShardCore {self.settings.model}:{stage.start}-{stage.stop - 1} {len(self._sessions)} sessions>"

    # ------------------------------------------------------------ outside

    def take_effects(self) -> list[Effect]:
        effects, self._effects.items = self._effects.items, []
        return effects

    @property
    def state(self) -> ShardState:
        waiting = sum(len(session.waiting) for session in self._sessions.values())
        residency = self._residency
        queue_depth = waiting + len(self._batches.running)
        return ShardState(residency.is_loaded, len(self._sessions), queue_depth, residency.step_us)

    @property
    def is_draining(self) -> bool:
        """No new sessions; those that run go on."""
        return self._life.is_draining

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        self._life.is_draining = is_draining

    def has_session(self, session: bytes) -> bool:
        return session in self._sessions

    def has_parked(self, session: bytes) -> bool:
        return session in self._life.parked

    @property
    def sessions(self) -> tuple[ShardSession, ...]:
        return tuple(self._sessions.values())

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def is_decoding(self) -> bool | None:
        """Whether the worker computes one token of one session; None where it has nothing to do."""
        return self._batches.is_decoding

    @property
    def outbox_bytes(self) -> int:
        return self._outbox.used_bytes

    def recall(self, resume_key: bytes) -> AnswerSoFar | None:
        """An answer whose head is not known to be lost, and may be all the same."""
        found = (session.answer for session in self._sessions.values() if session.resume_key == resume_key)
        return next(found, None)

    @property
    def resume_keys(self) -> list[bytes]:
        return [session.resume_key for session in self._sessions.values() if session.resume_key]

    @property
    def is_working(self) -> bool:
        """Whether the worker owes us an answer, so that its silence means something."""
        return bool(self._batches.running) or self._residency.is_loading or self._life.is_answer_owed

    def on_message(self, sender: bytes, message: Message, body: bytes, now_s: float, worker_idle_us: int) -> None:
        """Anything from an authenticated node. What is not addressed to a session of that node's is counted and dropped."""
        if type(message) is Step and (known := self._sessions.get(message.session)) is not None:
            return self._on_step(sender, known, message, body, now_s)
        if isinstance(message, Open):
            return self._life.open(sender, message, now_s)
        session = self._sessions.get(getattr(message, "session", b""))
        if isinstance(message, Probe):
            return self._on_probe(sender, message, session, now_s, worker_idle_us)
        if session is None:
            return self._on_unknown(sender, message)
        if sender != session.head:
            self.counters["not_the_head"] += 1
            return None
        return self._on_order(session, message, now_s)

    def _on_unknown(self, sender: bytes, message: Message) -> None:
        if isinstance(message, Close) and self._life.parked.belongs_to(message.session, sender):
            self._life.unpark(message.session)
            return
        if isinstance(message, Close) and message.session not in self._life.closed:
            self._life.closed_early.add(sender + message.session)
        self.counters["unknown_session"] += 1

    def _on_order(self, session: ShardSession, message: Message, now_s: float) -> None:
        """What only the session's head may say."""
        session.used_s = now_s
        if isinstance(message, Close):
            self._life.close(session, message, now_s)
        elif isinstance(message, ShardLost):
            self._on_shard_lost(message)
        elif session.phase is not Phase.ACTIVE:
            self.counters["unexpected_message"] += 1  # until OPENED there is nothing to order
        elif isinstance(message, Rewire):
            self._on_rewire(session, message)
        elif isinstance(message, Replay):
            self._on_replay(session, message)
        elif isinstance(message, Truncate):
            self._on_truncate(session, message)
        elif isinstance(message, Credit):
            self._passing_on.credit(session, message, now_s)
        else:
            self.counters["unexpected_message"] += 1

    def _on_shard_lost(self, message: ShardLost) -> None:
        if message.node != self.node:
            self._effects.items.append(Suspect(message.node, message.reason))

    def on_node_lost(self, node: bytes, now_s: float) -> None:
        """The link to a node broke, or it could not be reached: its own sessions end, others' heads learn about it."""
        for parked in self._life.parked.of(node):
            self._life.unpark(parked)
        for session in list(self._sessions.values()):
            if session.head == node:
                self._give_up(session, now_s)
            elif session.next is not None and session.next.node == node:
                self._effects.fault(session, "shard_unavailable", "the next shard is gone", node)
            elif session.wiring.ring is not None and session.wiring.ring.node == node:
                self._effects.fault(session, "shard_unavailable", "the first shard is gone", node)

    def _give_up(self, session: ShardSession, now_s: float) -> None:
        """Ends it without its head, whose reader may take the answer up elsewhere."""
        if (answer := session.answer) is not None:
            self._effects.items.append(Remember(session.resume_key, answer))
        self._life.drop(session, now_s)

    def give_up_silent(self, now_s: float) -> None:
        """Ends sessions of which nothing was heard for long: streams are few, and a head that waits lets its shards know."""
        for session in list(self._sessions.values()):
            if session.is_silent(now_s, self.settings.silent_session_s):
                self.counters["silent_session"] += 1
                self._effects.fault(session, "shard_unavailable", "nothing was heard of it for long", self.node)
                self._give_up(session, now_s)

    # ------------------------------------------------------------ steps

    def _on_step(self, sender: bytes, session: ShardSession, step: Step, body: bytes, now_s: float) -> None:
        if not session.may_feed(sender, step.source):
            self.counters["not_a_neighbour"] += 1
            return
        if step.epoch != session.epoch:
            self.counters["stale_epoch" if step.epoch < session.epoch else "future_epoch"] += 1
            return
        if step.position < session.length_in:
            self.counters["duplicate_step"] += 1
            return
        if session.is_faulty:
            self.counters["after_a_fault"] += 1  # its head has been told, and decides who goes
            return
        if step.is_rehearsal:
            self.rehearsals.take(session, step, body, self.settings.max_waiting)
            return
        problem = session.problem_with(step, body, self.settings.max_waiting)
        if problem is not None:
            self.counters["refused_step"] += 1
            self._effects.fault(session, "bad_request", problem, sender)
            return
        session.take(step, body, now_s)
        self._batches.wait(session)
        if len(self._sessions) == 1:
            self._batches.start(self._sessions)

    @property
    def has_batch_to_start(self) -> bool:
        """Steps of several sessions often come together, and are worth computing together: `start_batch` when all have been told."""
        return self._batches.is_due(self._sessions)

    def start_batch(self) -> None:
        self._batches.start(self._sessions)

    # ------------------------------------------------------------ what the worker says

    def load(self) -> None:
        """Load now instead of at the first OPEN."""
        self._residency.load()

    def on_worker_message(self, message: FromWorker, body: bytes, now_s: float) -> None:
        if isinstance(message, BatchDone):
            self._on_batch_done(message, body, now_s)
        elif isinstance(message, Loaded):
            for session in self._residency.loaded(message.step_us, now_s):
                self._life.open_in_worker(session)
        elif isinstance(message, LoadFailed):
            for session in self._residency.failed():
                self._life.refuse(session, message.code, message.message)
        elif isinstance(message, SessionOpened | SessionRefused):
            self._life.on_worker_answer(message, now_s)

    def on_worker_lost(self, reason: str) -> None:
        """All KV is gone: every session's head is told at once, and the sessions are forgotten."""
        self._residency.lost()
        self.counters["worker_lost"] += 1
        for session in list(self._sessions.values()):
            self._effects.fault(session, "shard_unavailable", f"the worker is gone: {reason}"[:1024], self.node)
            self._life.forget(session)
        self._batches.forget()
        self._life.forget_worker()

    def evict_if_idle(self, now_s: float) -> bool:
        """Unloads where nobody has used the shard for long; it stays on offer and loads again at the next OPEN."""
        for parked in self._life.parked.expired(now_s, self.settings.eviction_idle_s):
            self._life.unpark(parked)
        is_idle = not self._sessions and self._residency.is_unused(now_s)
        if is_idle:
            self.evict()
        return is_idle

    def evict(self) -> None:
        """Frees the worker's memory. Live sessions are never evicted."""
        if self._residency.is_loaded and not self._sessions:
            self._batches.forget()  # of sessions that are gone; the worker ends without an answer
            self._life.forget_worker()
            self._residency.unload()

    def _on_batch_done(self, message: BatchDone, body: bytes, now_s: float) -> None:
        running = self._batches.running
        batch = running.get(message.batch)
        if batch is None:
            self.counters["unknown_batch"] += 1
            return
        offset, compute_us = 0, message.compute_us
        if not any(output.code for output in message.outputs):
            self._batches.note(batch, compute_us)
        if len(batch) == 1 and batch[0].step.count == 1:
            self._residency.note_step(compute_us)
        for item, output in zip(batch, message.outputs, strict=True):
            piece = body[offset : offset + output.size_bytes]
            offset += output.size_bytes
            self._on_output(item, output, piece, compute_us, now_s)
        # Only now: a shard that is its own next would start again with the first of these tokens, and the others would wait.
        del running[message.batch]
        self._batches.start(self._sessions)

    def _on_output(self, running: Running, output: WorkOutput, body: bytes, compute_us: int, now_s: float) -> None:
        session, step = running.session, running.step
        if self._sessions.get(session.id) is not session:
            return  # closed while it was computed
        session.batches_running -= 1
        session.used_s = now_s
        if session.waiting:
            self._batches.wait(session)
        if running.cuts != session.cuts or session.is_faulty:
            return  # a rewire or truncation came in between, and the worker has cut off what this added; or the step before it failed
        if output.code:
            self._on_failed_step(session, output)
            return
        session.length_out = step.position + step.count
        self.observe(now_s - running.arrived_s)
        self._passing_on.pass_on(session, step, output, body, running.spent(compute_us, now_s), now_s)

    def _on_failed_step(self, session: ShardSession, output: WorkOutput) -> None:
        """Its head learns of it once. What waits would fail as well, for want of this step, and look like this shard's own fault."""
        session.is_faulty = True
        session.waiting.clear()
        self._batches.drop(session.id)
        previous = session.wiring.previous
        culprit = previous.node if previous is not None else session.head
        self.counters[output.code] += 1
        self._effects.fault(
            session, output.code, output.message, culprit if output.code == "shard_corruption" else self.node
        )

    # ------------------------------------------------------------ a new epoch

    def _on_rewire(self, session: ShardSession, message: Rewire) -> None:
        if message.epoch <= session.epoch:
            self.counters["stale_epoch"] += 1
            return
        session.rewire(message)
        session.renew_sampler(message.sampler)
        session.credits, session.held_token = 0, None
        self._cut(session, min(message.length, session.length_out))
        kept = 0 if self._outbox.holds(session.id, session.length_in) else session.length_in
        self._effects.send(session.head, None, Rewired(session.id, session.epoch, session.length_in, kept))

    def _on_truncate(self, session: ShardSession, message: Truncate) -> None:
        if message.epoch != session.epoch:
            self.counters["stale_epoch"] += 1
            return
        session.passed_on = min(session.passed_on, message.length)  # whoever follows is cut back as well
        session.held_token = None
        self._cut(session, min(message.length, session.length_out))

    def _cut(self, session: ShardSession, length: int) -> None:
        """Back to `length` positions. The worker does things in order, so whatever it is computing is cut off as well."""
        session.waiting.clear()
        session.is_faulty = False
        session.cuts += 1
        self._batches.drop(session.id)
        session.length_in = session.length_out = length
        if session.keeps_outbox and not session.stage.has_output:
            self._outbox.truncate(session.id, length, self._life.row_size(session.output_codec))
            if length == 0:
                self._outbox.open(session.id)  # also where it had been dropped: a new beginning
        self._effects.work(TruncateSession(session.id, length, None))

    def _on_replay(self, session: ShardSession, message: Replay) -> None:
        if message.epoch != session.epoch:
            self.counters["stale_epoch"] += 1
            return
        self._passing_on.replay(session, message)

    # ------------------------------------------------------------ the rest

    def _on_probe(
        self, sender: bytes, message: Probe, session: ShardSession | None, now_s: float, worker_idle_us: int
    ) -> None:
        answer = Probed(message.session, message.nonce, False, worker_idle_us, 0, 0)
        if session is not None and session.head == sender:
            session.used_s = now_s
            answer = Probed(
                message.session, message.nonce, True, worker_idle_us, session.length_in, session.length_out,
                self._batches.begun,
            )  # fmt: skip
        self._effects.send(sender, None, answer)
