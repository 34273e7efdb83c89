"""What becomes of an output: to the next shard, to the head, round the ring; and again from the outbox where a new shard needs it.

Knows the wiring of a session and its credit; not batches, nor whether a step that comes in is right.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from potluck.shard.effects import Effects
from potluck.shard.outbox import Outbox
from potluck.shard.sessions import ShardSession, Waiting
from potluck.wire.effects import SendTo
from potluck.wire.messages import MAX_STEP_TOKENS, Credit, Hop, Replay, Result, Step
from potluck.wire.work import WorkOutput

_REPLAY_STEPS = 32  # so that a replay fits into the next shard's queue, however long the session is
OwnStep = Callable[[bytes, ShardSession, Step, bytes, float], None]
RowSize = Callable[[str | None], int]


def token_body(token: int) -> bytes:
    """Of a step whose only position is that token."""
    return token.to_bytes(4, "little")


class PassingOn:
    """`on_own_step(node, session, step, body, now_s)` is told where the ring leads back to this very shard.

    What is replayed goes out in steps of `replay_rows` or more, of rows whose bytes `row_size(codec)` tells.
    """

    def __init__(
        self, node: bytes, effects: Effects, outbox: Outbox, sessions: Mapping[bytes, ShardSession],
        counters: Counter[str], on_own_step: OwnStep, replay_rows: int, row_size: RowSize,
    ) -> None:  # fmt: skip
        self._node, self._effects, self._outbox = node, effects, outbox
        self._sessions, self._counters, self._on_own_step = sessions, counters, on_own_step
        self._replay_rows, self._row_size = replay_rows, row_size

    def __repr__(self) -> str:
        return f"<PassingOn with {self._outbox!r}>"

    def pass_on(
        self, session: ShardSession, step: Step, output: WorkOutput, body: bytes, spent: bytes, now_s: float
    ) -> None:
        stop = step.position + step.count
        if session.stage.has_output:
            if stop > session.wiring.forward_from or step.chooses:
                if session.resume_key and output.token is not None and session.sampler is not None:
                    session.note_choice(session.sampler, stop, output.token)
                # The ring first: the next token waits for it, while the head only passes on what it gets.
                self._feed_ring(session, stop, output.token, now_s)
                round_us = 0 if output.token is None else session.end_round(now_s)
                result = Result(
                    session.id, session.epoch, stop, output.token, output.logprob, output.top, spent, round_us
                )
                self._effects.items.append(SendTo(session.head, None, result, body))
            return
        if step.position > session.passed_on:
            self._catch_up(session, step.position)
        if step.position == session.passed_on:
            session.passed_on = stop
            self._forward(session, step.position, step.count, body, spent, chooses=step.chooses)
        self._outbox.keep(session.id, step.position, step.count, body)

    def _forward(
        self, session: ShardSession, position: int, count: int, body: bytes, spent: bytes, *, chooses: bool
    ) -> None:
        hop = session.wiring.next
        node, address = (session.head, None) if hop is None else (hop.node, hop.address)
        message = session.onward(position, count, spent, chooses=chooses)
        self._effects.items.append(SendTo(node, address, message, body))

    # ------------------------------------------------------------ again, from the outbox

    def replay(self, session: ShardSession, message: Replay) -> None:
        """What a new shard is to be fed by this one, as early as that can be."""
        if session.has_replayed:
            self._counters["late_replay"] += 1
        elif self._send_again(session, message.start, message.stop) and message.start <= session.passed_on:
            session.passed_on = max(session.passed_on, message.stop)

    def _catch_up(self, session: ShardSession, position: int) -> None:
        """A step is to go on, and whoever follows has not what comes before it: the order to replay is still on its way.

        That comes from the head, the step by way of other shards, and each way takes its own time.
        """
        if self._send_again(session, session.passed_on, position):
            session.passed_on = position

    def _send_again(self, session: ShardSession, start: int, stop: int) -> bool:
        """Positions start … stop - 1. False, and the head is told, where they are gone."""
        if not self._outbox.holds(session.id, stop):
            self._effects.fault(session, "outbox_dropped", "the outputs to replay are gone", self._node)
            return False
        session.has_replayed = True
        row_bytes = self._row_size(session.output_codec)
        most_rows = min(max(self._replay_rows, -(-stop // _REPLAY_STEPS)), MAX_STEP_TOKENS)
        for piece in self._outbox.pieces(session.id, start, stop, most_rows, row_bytes):
            self._forward(session, piece.position, piece.count, piece.body, b"", chooses=False)
        return True

    # ------------------------------------------------------------ the ring

    def _feed_ring(self, session: ShardSession, position: int, token: int | None, now_s: float) -> None:
        ring, sampler = session.wiring.ring, session.sampler
        if ring is None or sampler is None or token is None:
            return
        if token in sampler.eos or position + 1 >= sampler.limit:
            return
        session.held_token = Waiting(session.round_again(ring, position), token_body(token), now_s)
        self._release_token(session, ring, now_s)

    def _release_token(self, session: ShardSession, ring: Hop, now_s: float) -> None:
        held = session.held_token
        if held is None or session.credits == 0:
            return
        session.credits -= 1
        session.held_token = None
        own = self._sessions.get(ring.session) if ring.node == self._node else None
        if own is None:
            self._effects.send(ring.node, ring.address, held.step, held.body)
        elif own.head == session.head:
            self._on_own_step(self._node, own, held.step, held.body, now_s)  # one shard that runs the whole loop
        else:
            self._counters["not_the_head"] += 1

    def credit(self, session: ShardSession, message: Credit, now_s: float) -> None:
        if message.epoch != session.epoch or session.wiring.ring is None:
            self._counters["stale_epoch"] += 1
            return
        session.credits += message.tokens
        if session.held_token is not None:
            session.chose_s = now_s  # the reader was slow; the round that begins now is not
        self._release_token(session, session.wiring.ring, now_s)
