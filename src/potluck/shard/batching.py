"""Which waiting steps go to the worker together, and which the worker has: one batch, and the next one behind it where that is full.

Knows sessions by what waits in them; not where steps come from nor what becomes of the outputs.
"""

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from potluck.shard.effects import Effects
from potluck.shard.residency import Residency
from potluck.shard.sessions import ShardSession
from potluck.wire.messages import Step
from potluck.wire.spent import add_spent
from potluck.wire.work import RunBatch, TruncateSession, WorkItem


class Running(msgspec.Struct, frozen=True):
    """An item that the worker has; a session that was cut since then does not want the answer any more."""

    session: ShardSession
    cuts: int
    step: Step
    arrived_s: float

    def spent(self, compute_us: int, now_s: float) -> bytes:
        """What its round has cost when it is done."""
        return add_spent(self.step.spent, compute_us, int((now_s - self.arrived_s) * 1e6) - compute_us)


class Batches:
    """`running`: by number, what the worker owes an answer to."""

    def __init__(self, effects: Effects, residency: Residency, batch_tokens: int) -> None:
        """`batch_tokens`: of prompts, in one batch."""
        self._effects, self._residency, self._batch_tokens = effects, residency, batch_tokens
        self.running: dict[int, list[Running]] = {}
        self._next = 1
        self._ready: OrderedDict[bytes, ShardSession] = OrderedDict()  # with waiting steps, first come first served

    def __repr__(self) -> str:
        return f"<Batches {len(self._ready)} ready, {len(self.running)} running>"

    @property
    def next_number(self) -> int:
        """Of the batch that is sent next."""
        return self._next

    @property
    def begun(self) -> int:
        """How many the worker was given so far."""
        return self._next - 1

    def drop(self, session: bytes) -> None:
        """Nothing of that session waits any more."""
        self._ready.pop(session, None)

    def forget(self) -> None:
        """The worker is gone, or will go without an answer."""
        self.running.clear()

    def is_due(self, sessions: Mapping[bytes, ShardSession]) -> bool:
        """Whether a batch can be started, of `sessions`, which are all there are."""
        if not self._ready or not self._residency.is_loaded:
            return False
        return not self.running or (len(self.running) == 1 and self._is_full(sessions))

    def _is_full(self, sessions: Mapping[bytes, ShardSession]) -> bool:
        """Whether the next batch is the same whenever it is sent: then the worker has it before it needs it, and never waits for us.

        Not with prompts, which take long: whoever comes meanwhile would wait for two of them.
        """
        if len(self._ready) < _most_decodes(sessions):
            return False
        return all(session.waiting[0].step.count == 1 for session in self._ready.values())

    def start(self, sessions: Mapping[bytes, ShardSession]) -> None:
        """What is due. Waiting for more would idle the shards in turn, and taking all would make them work in turn."""
        while self._ready and self.is_due(sessions):
            self._send(list(self._ready.values()) if len(self._ready) == 1 else self._chosen(sessions))

    def wait(self, session: ShardSession) -> None:
        """Something waits there; it goes with a batch that is started later."""
        if not session.is_running:
            self._ready[session.id] = session

    def _chosen(self, sessions: Mapping[bytes, ShardSession]) -> list[ShardSession]:
        most = _most_decodes(sessions)
        tokens, decodes = 0, 0
        chosen: list[ShardSession] = []
        for session in self._ready.values():
            count = session.waiting[0].step.count
            if count == 1 and decodes < most:
                decodes += 1
            elif count > 1 and (tokens == 0 or tokens + count <= self._batch_tokens):
                tokens += count
            else:
                continue
            chosen.append(session)
        return chosen

    def _send(self, sessions: list[ShardSession]) -> None:
        batch, items, bodies = [], [], []
        for session in sessions:
            del self._ready[session.id]
            waiting = session.waiting.popleft()
            step = waiting.step
            session.is_running = True
            if session.untold_sampler is not None:
                # Not with the rewire, which has no answer: a head could make any number of those, each with its own grammar.
                self._effects.work(TruncateSession(session.id, step.position, session.untold_sampler))
                session.untold_sampler = None
            batch.append(Running(session, session.cuts, step, waiting.arrived_s))
            items.append(work_item(session, step, len(waiting.body)))
            bodies.append(waiting.body)
        number = self._next
        self._next += 1
        self.running[number] = batch
        self._effects.work(RunBatch(number, tuple(items)), bodies[0] if len(bodies) == 1 else b"".join(bodies))


def work_item(session: ShardSession, step: Step, size_bytes: int) -> WorkItem:
    return WorkItem(
        session.id, step.position, step.count, step.codec, session.output_codec, step.chooses and session.stage.has_output,
        size_bytes, session.scores_prompt(step),
    )  # fmt: skip


def _most_decodes(sessions: Mapping[bytes, ShardSession]) -> int:
    """⌈sessions ÷ shards⌉, so that the shards of a pipeline work side by side."""
    stages = max(session.wiring.stages for session in sessions.values())
    return -(-len(sessions) // stages)
