"""The shard server's decisions, without I/O: messages, worker replies and losses in; messages and work out.

Whoever drives it (a node on sockets, a test on a simulated network) hands over what happened and carries out the effects in order.
A step whose sender, epoch, position, shape or codec does not fit is refused or dropped and counted, never guessed.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from potluck.shard.outbox import Outbox
from potluck.shard.parked import ParkedSessions
from potluck.shard.sessions import Phase, ShardSession, Waiting
from potluck.shard.settings import ShardSettings, ShardState, objection
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    MAX_STAGES,
    MAX_STEP_TOKENS,
    Close,
    Credit,
    Fault,
    Hop,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    Refused,
    Replay,
    Result,
    Rewire,
    Rewired,
    ShardLost,
    Spent,
    Step,
    Truncate,
)
from potluck.wire.work import (
    BatchDone,
    CloseSession,
    FromWorker,
    Load,
    Loaded,
    LoadFailed,
    OpenSession,
    ParkSession,
    RunBatch,
    SessionOpened,
    SessionRefused,
    ToWorker,
    TruncateSession,
    Unload,
    WorkItem,
    WorkOutput,
)

_REMEMBERED = 1024
_REPLAY_STEPS = 32  # so that a replay fits into the next shard's queue, however long the session is


class Work(msgspec.Struct, frozen=True):
    message: ToWorker
    body: bytes = b""


class Suspect(msgspec.Struct, frozen=True):
    """A head says that this node was lost from its pipeline: whoever routes should prefer others for a while."""

    node: bytes
    reason: str


Effect = SendTo | Work | Suspect


class _Running(msgspec.Struct, frozen=True):
    """An item that the worker has; a session that was cut since then does not want the answer any more."""

    session: ShardSession
    cuts: int
    step: Step
    arrived_s: float


__all__ = ["Effect", "ShardCore", "ShardSettings", "ShardState", "Suspect", "Work"]

RowBytes = Callable[[str, int, int], int]


def _ignore(seconds: float) -> None:
    return


class ShardCore:
    """One shard: its sessions, its batches, its worker's state."""

    def __init__(self, node: bytes, settings: ShardSettings, row_bytes: RowBytes) -> None:
        self.node = node
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self.observe: Callable[[float], None] = _ignore  # told how long each step was here, in seconds
        self._row_bytes = row_bytes  # (codec, rows, width) → bytes
        self._sessions: OrderedDict[bytes, ShardSession] = OrderedDict()
        self._outbox = Outbox(settings.outbox_budget_bytes)
        self._parked = ParkedSessions(settings.parked_sessions)
        self._effects: list[Effect] = []
        self.is_draining = False  # no new sessions; those that run go on
        self._batches: dict[int, list[_Running]] = {}
        self._next_batch = 1
        self._ready: OrderedDict[bytes, None] = OrderedDict()  # sessions with waiting steps, first come first served
        self._is_loaded = self._is_loading = False
        self._closed: OrderedDict[bytes, None] = (
            OrderedDict()
        )  # the last few, so that a late OPEN cannot bring one back
        self._postponed: list[ShardSession] = []  # opened while the shard was being loaded
        self._step_us = 0
        self._idle_since_s = 0.0

    def __repr__(self) -> str:
        stage = self.settings.stage
        return f"<ShardCore {self.settings.model}:{stage.start}-{stage.stop - 1} {len(self._sessions)} sessions>"

    # ------------------------------------------------------------ outside

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def state(self) -> ShardState:
        waiting = sum(len(session.waiting) for session in self._sessions.values())
        return ShardState(self._is_loaded, len(self._sessions), waiting + len(self._batches), self._step_us)

    def has_session(self, session: bytes) -> bool:
        return session in self._sessions

    def has_parked(self, session: bytes) -> bool:
        return session in self._parked

    @property
    def sessions(self) -> tuple[ShardSession, ...]:
        return tuple(self._sessions.values())

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def outbox_bytes(self) -> int:
        return self._outbox.used_bytes

    @property
    def is_working(self) -> bool:
        """Whether the worker owes us an answer, so that its silence means something."""
        return bool(self._batches) or self._is_loading or any(s.phase is Phase.OPENING for s in self._sessions.values())

    def on_message(self, sender: bytes, message: Message, body: bytes, now_s: float, worker_idle_us: int) -> None:
        """Anything from an authenticated node. What is not addressed to a session of that node's is counted and dropped."""
        if type(message) is Step and (known := self._sessions.get(message.session)) is not None:
            return self._on_step(sender, known, message, body, now_s)
        if isinstance(message, Open):
            return self._on_open(sender, message, now_s)
        session = self._sessions.get(getattr(message, "session", b""))
        if isinstance(message, Probe):
            return self._on_probe(sender, message, session, worker_idle_us)
        if session is None:
            return self._on_unknown(sender, message)
        if sender != session.head:
            self.counters["not_the_head"] += 1
            return None
        return self._on_order(session, message, now_s)

    def _on_unknown(self, sender: bytes, message: Message) -> None:
        if isinstance(message, Close) and self._parked.belongs_to(message.session, sender):
            self._unpark(message.session)
        else:
            self.counters["unknown_session"] += 1

    def _on_order(self, session: ShardSession, message: Message, now_s: float) -> None:
        """What only the session's head may say."""
        if isinstance(message, Close):
            self._on_close(session, message, now_s)
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
            self._on_credit(session, message, now_s)
        else:
            self.counters["unexpected_message"] += 1

    def _on_shard_lost(self, message: ShardLost) -> None:
        if message.node != self.node:
            self._effects.append(Suspect(message.node, message.reason))

    def on_node_lost(self, node: bytes, now_s: float) -> None:
        """The link to a node broke, or it could not be reached: its own sessions end, others' heads learn about it."""
        for parked in self._parked.of(node):
            self._unpark(parked)
        for session in list(self._sessions.values()):
            if session.head == node:
                self._drop(session, now_s)
            elif session.next is not None and session.next.node == node:
                self._fault(session, "shard_unavailable", "the next shard is gone", node)
            elif session.wiring.ring is not None and session.wiring.ring.node == node:
                self._fault(session, "shard_unavailable", "the first shard is gone", node)

    # ------------------------------------------------------------ opening

    def _on_open(self, sender: bytes, message: Open, now_s: float) -> None:
        known = self._sessions.get(message.session)
        if (known is not None and known.head == sender) or message.session in self._closed:
            self.counters["duplicate_open"] += 1
            return
        problem = objection(message, self.settings, len(self._sessions), is_known=known is not None)
        if self.is_draining and problem is None:
            problem = "shard_unavailable", "this shard is being given up"
        if problem is not None:
            self.counters[f"refused_{problem[0]}"] += 1
            if known is None:
                self._remember(message.session)  # a copy of it that comes late must not be taken when there is room
            self._send(sender, None, Refused(message.session, message.epoch, *problem))
            return
        session = ShardSession.of(message, sender)
        if self._parked.resumable(message, sender):
            session.resumes, session.resumed = message.resumes, message.resumed
        session.input_row_bytes = self._size(session.input_codec, 1)
        self._sessions[session.id] = session
        if self._is_loaded:
            self._open_in_worker(session)
        else:
            self._postponed.append(session)
            self.load()

    def _open_in_worker(self, session: ShardSession) -> None:
        self._work(
            OpenSession(
                session.id, session.stage, session.positions, session.boundaries, session.sampler, session.resumes,
                session.resumed,
            )
        )  # fmt: skip

    def _activate(self, session: ShardSession, length: int) -> None:
        session.phase = Phase.ACTIVE
        session.length_in = session.length_out = length
        if session.keeps_outbox and not session.stage.has_output:
            if length and session.resumes is not None:
                self._outbox.adopt(session.id, session.resumes, length, self._size(session.output_codec, 1))
            else:
                self._outbox.open(session.id)
        self._send(session.head, None, Opened(session.id, session.epoch, length))

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
        problem = self._step_problem(session, step, body)
        if problem is not None:
            self.counters["refused_step"] += 1
            self._fault(session, "bad_request", problem, sender)
            return
        session.length_in += step.count
        session.waiting.append(Waiting(step, body, now_s))
        if not session.is_running:
            self._ready[session.id] = None
        self._run_batch()

    def _step_problem(self, session: ShardSession, step: Step, body: bytes) -> str | None:
        if session.phase is not Phase.ACTIVE:
            return "the session is not open yet"
        if step.position != session.length_in:
            return f"step at position {step.position}, expected {session.length_in}"
        if step.position + step.count > session.positions:
            return f"position {step.position + step.count - 1} is past the {session.positions} that were reserved"
        if step.layer != session.stage.start:
            return f"activations for layer {step.layer}, expected {session.stage.start}"
        if step.codec != session.input_codec:
            return f"codec {step.codec}, expected {session.input_codec}"
        if len(body) != step.count * session.input_row_bytes:
            return f"{len(body)} bytes for {step.count} positions, expected {step.count * session.input_row_bytes}"
        if len(session.waiting) >= self.settings.max_waiting:
            return f"more than {self.settings.max_waiting} steps are waiting"
        return None

    def _size(self, codec: str | None, count: int) -> int:
        return 4 * count if codec is None else self._row_bytes(codec, count, self.settings.hidden_size)

    def _run_batch(self) -> None:
        """One batch at a time: waiting for more would idle the shards in turn, and taking all would make them work in turn."""
        if self._batches or not self._ready or not self._is_loaded:
            return None
        if len(self._ready) == 1:
            return self._send_batch([self._sessions[next(iter(self._ready))]])
        most = self._most_decodes()
        tokens, decodes = 0, 0
        chosen: list[ShardSession] = []
        for session_id in self._ready:
            session = self._sessions[session_id]
            count = session.waiting[0].step.count
            if count == 1 and decodes < most:
                decodes += 1
            elif count > 1 and (tokens == 0 or tokens + count <= self.settings.batch_tokens):
                tokens += count
            else:
                continue
            chosen.append(session)
        return self._send_batch(chosen)

    def _most_decodes(self) -> int:
        """⌈sessions ÷ shards⌉, so that the shards of a pipeline work side by side."""
        stages = max(session.wiring.stages for session in self._sessions.values())
        return -(-len(self._sessions) // stages)

    def _send_batch(self, sessions: list[ShardSession]) -> None:
        batch, items, bodies = [], [], []
        for session in sessions:
            del self._ready[session.id]
            waiting = session.waiting.popleft()
            step = waiting.step
            session.is_running = True
            batch.append(_Running(session, session.cuts, step, waiting.arrived_s))
            items.append(
                WorkItem(
                    session.id, step.position, step.count, step.codec, session.output_codec,
                    step.chooses and session.stage.has_output, len(waiting.body), session.scores_prompt(step),
                )
            )  # fmt: skip
            bodies.append(waiting.body)
        number = self._next_batch
        self._next_batch += 1
        self._batches[number] = batch
        self._work(RunBatch(number, tuple(items)), bodies[0] if len(bodies) == 1 else b"".join(bodies))

    # ------------------------------------------------------------ what the worker says

    def load(self) -> None:
        """Load now instead of at the first OPEN. Whoever carries out the effect starts a worker where there is none."""
        if not self._is_loaded and not self._is_loading:
            self._is_loading = True
            self._work(Load(self.settings.stage))

    def on_worker_message(self, message: FromWorker, body: bytes, now_s: float) -> None:
        if isinstance(message, BatchDone):
            self._on_batch_done(message, body, now_s)
        elif isinstance(message, Loaded):
            self._is_loaded, self._is_loading, self._step_us = True, False, message.step_us
            self._idle_since_s = now_s
            for session in self._postponed:
                self._open_in_worker(session)
            self._postponed = []
        elif isinstance(message, LoadFailed):
            self._is_loading = False
            for session in self._postponed:
                self._refuse(session, message.code, message.message)
            self._postponed = []
        elif isinstance(message, SessionOpened | SessionRefused):
            self._on_session_answer(message)

    def _on_session_answer(self, message: SessionOpened | SessionRefused) -> None:
        session = self._sessions.get(message.session)
        if session is None or session.phase is not Phase.OPENING:
            return  # closed meanwhile; the worker has been told
        if isinstance(message, SessionOpened):
            self._activate(session, message.length)
        else:
            self._refuse(session, message.code, message.message)

    def _refuse(self, session: ShardSession, code: str, text: str) -> None:
        if self._forget(session):
            self._send(session.head, None, Refused(session.id, session.epoch, code, text))

    def on_worker_lost(self, reason: str) -> None:
        """All KV is gone: every session's head is told at once, and the sessions are forgotten.

        The worker's supervisor starts another one and loads again what was loaded.
        """
        self._is_loaded, self._is_loading = False, True
        self.counters["worker_lost"] += 1
        for session in list(self._sessions.values()):
            self._fault(session, "shard_unavailable", f"the worker is gone: {reason}"[:1024], self.node)
            self._forget(session)
        self._batches.clear()
        self._postponed = []
        self._forget_parked()

    def evict_if_idle(self, now_s: float) -> bool:
        """Unloads where nobody has used the shard for long; it stays on offer and loads again at the next OPEN."""
        for parked in self._parked.expired(now_s, self.settings.eviction_idle_s):
            self._unpark(parked)
        is_idle = self._is_loaded and not self._sessions and now_s - self._idle_since_s >= self.settings.eviction_idle_s
        if is_idle:
            self.evict()
        return is_idle

    def evict(self) -> None:
        """Frees the worker's memory. Live sessions are never evicted."""
        if self._is_loaded and not self._sessions:
            self._is_loaded = False
            self._batches.clear()  # of sessions that are gone; the worker ends without an answer
            self._forget_parked()
            self._work(Unload(self.settings.stage))

    def _on_batch_done(self, message: BatchDone, body: bytes, now_s: float) -> None:
        batch = self._batches.get(message.batch)
        if batch is None:
            self.counters["unknown_batch"] += 1
            return
        offset = 0
        share_us = message.compute_us
        if len(batch) == 1 and batch[0].step.count == 1:
            self._step_us = share_us if self._step_us == 0 else (7 * self._step_us + share_us) // 8
        for running, output in zip(batch, message.outputs, strict=True):
            piece = body[offset : offset + output.size_bytes]
            offset += output.size_bytes
            self._on_output(running, output, piece, share_us, now_s)
        # Only now: a shard that is its own next would start again with the first of these tokens, and the others would wait.
        del self._batches[message.batch]
        self._run_batch()

    def _on_output(self, running: _Running, output: WorkOutput, body: bytes, compute_us: int, now_s: float) -> None:
        session, step = running.session, running.step
        if self._sessions.get(session.id) is not session:
            return  # closed while it was computed
        session.is_running = False
        if session.waiting:
            self._ready[session.id] = None
        if running.cuts != session.cuts:
            return  # a rewire or truncation came in between; the worker has cut off what this added
        if output.code:
            previous = session.wiring.previous
            culprit = previous.node if previous is not None else session.head
            self.counters[output.code] += 1
            self._fault(
                session, output.code, output.message, culprit if output.code == "shard_corruption" else self.node
            )
            return
        session.length_out = step.position + step.count
        self.observe(now_s - running.arrived_s)
        queue_us = max(0, int((now_s - running.arrived_s) * 1e6) - compute_us)
        spent = (*step.spent[: MAX_STAGES - 1], Spent(compute_us, queue_us))
        self._pass_on(session, step, output, body, spent, now_s)

    def _pass_on(
        self, session: ShardSession, step: Step, output: WorkOutput, body: bytes, spent: tuple[Spent, ...], now_s: float
    ) -> None:
        stop = step.position + step.count
        if session.stage.has_output:
            if stop > session.wiring.forward_from or step.chooses:
                # The ring first: the next token waits for it, while the head only passes on what it gets.
                self._feed_ring(session, stop, output.token, now_s)
                self._send(
                    session.head, None,
                    Result(session.id, session.epoch, stop, output.token, output.logprob, output.top, spent), body,
                )  # fmt: skip
            return
        if step.position >= session.wiring.forward_from:
            self._forward(session, step.position, step.count, body, step.chooses, spent)
        self._outbox.keep(session.id, step.position, step.count, body)

    def _forward(
        self, session: ShardSession, position: int, count: int, body: bytes, chooses: bool, spent: tuple[Spent, ...]
    ) -> None:
        hop = session.wiring.next
        target = hop.session if hop is not None else session.id
        message = Step(
            target, session.epoch, position, count, session.stage.stop, session.output_codec, chooses, spent,
            session.id,
        )  # fmt: skip
        if hop is None:
            self._send(session.head, None, message, body)  # a remote prefix returns hidden states, never logits
        else:
            self._send(hop.node, hop.address, message, body)

    # ------------------------------------------------------------ the ring

    def _feed_ring(self, session: ShardSession, position: int, token: int | None, now_s: float) -> None:
        ring, sampler = session.wiring.ring, session.sampler
        if ring is None or sampler is None or token is None:
            return
        if token in sampler.eos or position + 1 >= sampler.limit:
            return
        step = Step(ring.session, session.epoch, position, 1, 0, None, True, source=session.id)
        session.held_token = Waiting(step, token.to_bytes(4, "little"), now_s)
        self._release_token(session, ring, now_s)

    def _release_token(self, session: ShardSession, ring: Hop, now_s: float) -> None:
        held = session.held_token
        if held is None or session.credits == 0:
            return
        session.credits -= 1
        session.held_token = None
        own = self._sessions.get(ring.session) if ring.node == self.node else None
        if own is None:
            self._send(ring.node, ring.address, held.step, held.body)
        elif own.head == session.head:
            self._on_step(self.node, own, held.step, held.body, now_s)  # one shard that runs the whole loop
        else:
            self.counters["not_the_head"] += 1

    def _on_credit(self, session: ShardSession, message: Credit, now_s: float) -> None:
        if message.epoch != session.epoch or session.wiring.ring is None:
            self.counters["stale_epoch"] += 1
            return
        session.credits += message.tokens
        self._release_token(session, session.wiring.ring, now_s)

    # ------------------------------------------------------------ a new epoch

    def _on_rewire(self, session: ShardSession, message: Rewire) -> None:
        if message.epoch <= session.epoch:
            self.counters["stale_epoch"] += 1
            return
        session.epoch, session.wiring = message.epoch, message.wiring
        session.sampler = message.sampler if message.sampler is not None else session.sampler
        session.credits, session.held_token = 0, None
        self._cut(session, min(message.length, session.length_out), message.sampler)
        kept = 0 if self._outbox.holds(session.id, session.length_in) else session.length_in
        self._send(session.head, None, Rewired(session.id, session.epoch, session.length_in, kept))

    def _on_truncate(self, session: ShardSession, message: Truncate) -> None:
        if message.epoch != session.epoch:
            self.counters["stale_epoch"] += 1
            return
        self._cut(session, min(message.length, session.length_out), None)

    def _cut(self, session: ShardSession, length: int, sampler: object) -> None:
        """Back to `length` positions. The worker does things in order, so whatever it is computing is cut off as well."""
        session.waiting.clear()
        session.cuts += 1
        self._ready.pop(session.id, None)
        session.length_in = session.length_out = length
        if session.keeps_outbox and not session.stage.has_output:
            self._outbox.truncate(session.id, length, self._size(session.output_codec, 1))
            if length == 0:
                self._outbox.open(session.id)  # also where it had been dropped: a new beginning
        self._work(TruncateSession(session.id, length, sampler))  # type: ignore[arg-type]

    def _on_replay(self, session: ShardSession, message: Replay) -> None:
        if message.epoch != session.epoch:
            self.counters["stale_epoch"] += 1
            return
        if not self._outbox.holds(session.id, message.stop):
            self._fault(session, "outbox_dropped", "the outputs to replay are gone", self.node)
            return
        row_bytes = self._size(session.output_codec, 1)
        most_rows = min(max(self.settings.replay_rows, -(-message.stop // _REPLAY_STEPS)), MAX_STEP_TOKENS)
        for piece in self._outbox.pieces(session.id, message.start, message.stop, most_rows, row_bytes):
            self._forward(session, piece.position, piece.count, piece.body, False, ())

    # ------------------------------------------------------------ the rest

    def _on_probe(self, sender: bytes, message: Probe, session: ShardSession | None, worker_idle_us: int) -> None:
        is_known = session is not None and session.head == sender
        position_in = session.length_in if session is not None and is_known else 0
        position_out = session.length_out if session is not None and is_known else 0
        self._send(
            sender, None, Probed(message.session, message.nonce, is_known, worker_idle_us, position_in, position_out)
        )

    def _on_close(self, session: ShardSession, message: Close, now_s: float) -> None:
        """Ends a session; where its head may come back to it, what it has computed stays with the worker for a while."""
        length = min(message.keeps, session.length_out)
        if length == 0 or self.is_draining or session.phase is not Phase.ACTIVE:
            return self._drop(session, now_s)
        del self._sessions[session.id]
        self._remember(session.id)
        self._ready.pop(session.id, None)
        self._outbox.truncate(session.id, length, self._size(session.output_codec, 1))
        self._work(ParkSession(session.id, length))
        self._idle_since_s = now_s
        for parked in self._parked.put(session, length, now_s):
            self._unpark(parked)
        return None

    def _unpark(self, session: bytes) -> None:
        self._parked.remove(session)
        self._outbox.close(session)
        self._work(CloseSession(session))

    def _forget_parked(self) -> None:
        """The worker that had them is gone."""
        for session in self._parked.all():
            self._parked.remove(session)
            self._outbox.close(session)

    def _drop(self, session: ShardSession, now_s: float) -> None:
        if not self._forget(session):
            return
        if session in self._postponed:
            self._postponed.remove(session)
        else:
            self._work(CloseSession(session.id))
        self._idle_since_s = now_s

    def _forget(self, session: ShardSession) -> bool:
        """Takes a session off every table; False where it was gone already."""
        if self._sessions.pop(session.id, None) is None:
            return False
        self._remember(session.id)
        self._ready.pop(session.id, None)
        self._outbox.close(session.id)
        return True

    def _remember(self, session: bytes) -> None:
        self._closed[session] = None
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def _fault(self, session: ShardSession, code: str, text: str, culprit: bytes | None) -> None:
        self._send(session.head, None, Fault(session.id, session.epoch, code, text, culprit))

    def _send(self, node: bytes, address: str | None, message: Message, body: bytes = b"") -> None:
        self._effects.append(SendTo(node, address, message, body))

    def _work(self, message: ToWorker, body: bytes = b"") -> None:
        self._effects.append(Work(message, body))
