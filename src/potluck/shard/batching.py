"""Which waiting steps go to the worker together, and which the worker has: one batch, and the next one behind it where that is certain.

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

_SOON_US = 50_000  # a chunk may wait in the worker for one that takes no longer: whoever comes meanwhile waits for both


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
        self._us_per_position: float | None = None  # of the last batch

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

    @property
    def is_decoding(self) -> bool | None:
        """Whether the batch that was sent last is one token of one session; None where the worker has nothing."""
        if not self.running:
            return None
        newest = self.running[max(self.running)]
        return len(newest) == 1 and newest[0].step.count == 1

    def drop(self, session: bytes) -> None:
        """Nothing of that session waits any more."""
        self._ready.pop(session, None)

    def note(self, batch: list[Running], compute_us: int) -> None:
        """How long one took that was computed."""
        self._us_per_position = compute_us / max(1, sum(running.step.count for running in batch))

    def forget(self) -> None:
        """The worker is gone, or will go without an answer."""
        self.running.clear()

    def is_due(self, sessions: Mapping[bytes, ShardSession]) -> bool:
        """Whether a batch can be started, of `sessions`, which are all there are."""
        if not self._residency.is_loaded or len(self.running) > 1:
            return False
        if not self._ready:
            return self._goes_on(sessions)
        return not self.running or self._is_full(sessions)

    def _is_full(self, sessions: Mapping[bytes, ShardSession]) -> bool:
        """Whether the next batch is the same whenever it is sent: then the worker has it before it needs it, and never waits for us.

        Not with prompts of several, which take long: whoever comes meanwhile would wait for two of them.
        """
        if len(self._ready) < _most_decodes(sessions):
            return False
        return all(session.waiting[0].step.count == 1 for session in self._ready.values())

    def _goes_on(self, sessions: Mapping[bytes, ShardSession]) -> bool:
        """Whether the worker is busy with the only session's prompt, and will soon want the next chunk: it need not wait for us either."""
        if len(sessions) != 1 or self._us_per_position is None:
            return False
        session = next(iter(sessions.values()))
        if not session.is_running or not session.waiting:
            return False
        count = session.waiting[0].step.count
        return count > 1 and count * self._us_per_position <= _SOON_US

    def start(self, sessions: Mapping[bytes, ShardSession]) -> None:
        """What is due. Waiting for more would idle the shards in turn, and taking all would make them work in turn."""
        while self.is_due(sessions):
            if len(self._ready) > 1:
                self._send(self._chosen(sessions))
            else:
                self._send(list((self._ready or sessions).values()))

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
            self._ready.pop(session.id, None)
            waiting = session.waiting.popleft()
            step = waiting.step
            session.batches_running += 1
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
