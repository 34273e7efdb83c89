"""What comes next, as far as a shard can know it: while one answer is on its way, all but the numbers in it.

Either a step will come, and then the worker gets this batch; or the worker will be done, and then this step goes on. Whoever drives the
core may let what was foreseen leave the moment that its numbers are there, and tell the core afterwards: the core decides then just
what was foreseen, or something has gone wrong. Pure; what is foreseen holds until the core is told anything else.
"""

import msgspec

from potluck.shard.batching import Batches, Running, work_item
from potluck.shard.effects import Work
from potluck.shard.lifecycle import Lifecycle
from potluck.shard.passing_on import token_body
from potluck.shard.residency import Residency
from potluck.shard.sessions import Phase, ShardSession
from potluck.wire.effects import SendTo
from potluck.wire.frames import URGENT_BYTES
from potluck.wire.messages import Sampler, Step
from potluck.wire.spent import MAX_STAGES, stages_in
from potluck.wire.work import BatchDone, RunBatch


class ForeseenArrival(msgspec.Struct, frozen=True):
    """`step` from `sender`, with the times of `stages` and some body of `body_bytes`: then the worker gets `batch`, with that body."""

    sender: bytes
    step: Step
    stages: int
    body_bytes: int
    batch: RunBatch

    def decision(self, body: bytes) -> Work:
        return Work(self.batch, body)


class ForeseenAnswer(msgspec.Struct, frozen=True):
    """The worker is done with batch number `batch`: then `step` goes to `node`, with the times of `stages` and a body of `body_bytes`.

    `sampler`: of a session whose tokens are chosen here; then the body is the token, and the step tells no times.
    """

    batch: int
    node: bytes
    address: str | None
    step: Step
    stages: int
    body_bytes: int
    running: Running
    sampler: Sampler | None

    def numbers(self, done: BatchDone, body: bytes, now_s: float) -> tuple[bytes, bytes] | None:
        """The step's times and body; None where the answer is not the one that was foreseen, or nothing goes on after it."""
        if done.batch != self.batch or len(done.outputs) != 1 or done.outputs[0].code:
            return None
        if self.sampler is None:
            return (self.running.spent(done.compute_us, now_s), body) if len(body) == self.body_bytes else None
        token = done.outputs[0].token
        if token is None or token in self.sampler.eos:
            return None
        return b"", token_body(token)

    def decision(self, spent: bytes, body: bytes) -> SendTo:
        return SendTo(self.node, self.address, msgspec.structs.replace(self.step, spent=spent), body)


class Foresight:
    """Only for a session that has the shard to itself, and only while it decodes."""

    def __init__(self, node: bytes, batches: Batches, residency: Residency, life: Lifecycle) -> None:
        self._node, self._batches, self._residency, self._life = node, batches, residency, life

    def __repr__(self) -> str:
        return f"<Foresight of {self._batches!r}>"

    def next(self) -> ForeseenArrival | ForeseenAnswer | None:
        """None where too much is open."""
        if len(self._life.live) != 1:
            return None
        if self._batches.running:
            return self._next_answer()
        return self._next_arrival(next(iter(self._life.live.values())))

    def _next_arrival(self, session: ShardSession) -> ForeseenArrival | None:
        is_waiting = session.phase is Phase.ACTIVE and not (session.waiting or session.is_running or session.is_faulty)
        # A sampler that the worker has not been told goes before the batch.
        if not is_waiting or not self._residency.is_loaded or session.untold_sampler is not None:
            return None
        position, size_bytes = session.length_in, session.input_row_bytes
        if not 0 < position < session.positions or size_bytes > URGENT_BYTES:
            return None
        neighbour = session.fed_by
        sender, source = (session.head, None) if neighbour is None else (neighbour.node, neighbour.session)
        step = Step(
            session.id, session.epoch, position, 1, session.stage.start, session.input_codec, True, source
        )  # fmt: skip
        batch = RunBatch(self._batches.next_number, (work_item(session, step, size_bytes),))
        return ForeseenArrival(sender, step, session.stages_before, size_bytes, batch)

    def _next_answer(self) -> ForeseenAnswer | None:
        [(number, batch), *more] = self._batches.running.items()
        running, session = batch[0], batch[0].session
        is_alone = not more and len(batch) == 1 and self._life.live.get(session.id) is session
        if not is_alone or running.step.count != 1 or running.cuts != session.cuts or session.is_faulty:
            return None
        if session.stage.has_output:
            return self._next_token(number, running, session)
        return self._next_activations(number, running, session)

    def _next_token(self, number: int, running: Running, session: ShardSession) -> ForeseenAnswer | None:
        ring, sampler, stop = session.wiring.ring, session.sampler, running.step.position + 1
        if ring is None or sampler is None or ring.node == self._node or not running.step.chooses:
            return None
        if session.credits == 0 or session.held_token is not None or stop + 1 >= sampler.limit:
            return None
        step = session.round_again(ring, stop)
        return ForeseenAnswer(number, ring.node, ring.address, step, 0, len(token_body(0)), running, sampler)

    def _next_activations(self, number: int, running: Running, session: ShardSession) -> ForeseenAnswer | None:
        size_bytes = self._life.row_size(session.output_codec)
        if running.step.position != session.passed_on or size_bytes > URGENT_BYTES:
            return None
        hop = session.wiring.next
        node, address = (session.head, None) if hop is None else (hop.node, hop.address)
        step = session.onward(running.step.position, 1, b"", chooses=running.step.chooses)
        stages = min(stages_in(running.step.spent) + 1, MAX_STAGES)
        return ForeseenAnswer(number, node, address, step, stages, size_bytes, running, None)
