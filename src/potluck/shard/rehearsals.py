"""Rehearsals: just before the worker is done with a token, a step without effect goes the way that the real one is about to go, so that
everybody on it is awake and has the code at hand. A hop is mostly wake-ups and cold caches (docs/hop.md); these happen meanwhile.

Decides when and what. Whoever drives the core has the clock; whoever gets a rehearsal changes nothing for it.
"""

import msgspec

from potluck.shard.batching import Batches, work_item
from potluck.shard.effects import Effects
from potluck.shard.lifecycle import Lifecycle
from potluck.shard.residency import Residency
from potluck.shard.sessions import ShardSession
from potluck.shard.settings import ShardSettings
from potluck.wire.messages import Step
from potluck.wire.work import Rehearse

_SHORTEST_WAIT_S = 0.001  # what a loop's timer can do


class Rehearsals:
    """Only for a session that has the shard to itself: with more of them nobody sleeps, and the cores have better things to do."""

    def __init__(
        self,
        node: bytes,
        settings: ShardSettings,
        effects: Effects,
        batches: Batches,
        residency: Residency,
        life: Lifecycle,
    ) -> None:
        self._node = node
        self._lead_s, self._shortest_s = settings.rehearsal_lead_s, settings.rehearsal_shortest_s
        self._reaches_worker = settings.rehearsal_reaches_worker
        self._effects, self._batches, self._residency, self._life = effects, batches, residency, life

    def __repr__(self) -> str:
        return f"<Rehearsals {self._lead_s * 1000:.1f} ms ahead>"

    def due_in_s(self) -> float | None:
        """How long after a batch was given to the worker; None where there is nothing to rehearse, or no time for it."""
        step_s = self._residency.step_us / 1e6
        if self._lead_s == 0 or len(self._life.live) != 1 or step_s < self._shortest_s:
            return None
        wait_s = step_s - self._lead_s
        return wait_s if wait_s >= _SHORTEST_WAIT_S else 0.0

    def send(self, batch: int) -> bool:
        """What the next shard will be sent when `batch` is done, as far as that can be known; false where nothing is sent."""
        running = self._batches.running.get(batch)
        if running is None or len(self._life.live) != 1 or running[0].step.count != 1:
            return False
        session, position = running[0].session, running[0].step.position
        is_last = session.stage.has_output
        hop = session.wiring.ring if is_last else session.wiring.next
        if hop is None or hop.node == self._node:
            return False
        step = session.round_again(hop, position + 1) if is_last else session.onward(position, 1, b"", chooses=True)
        rehearsal = msgspec.structs.replace(step, is_rehearsal=True)
        self._effects.send(hop.node, hop.address, rehearsal, bytes(self._life.row_size(session.output_codec)))
        return True

    def take(self, session: ShardSession, step: Step, body: bytes, max_waiting: int) -> None:
        """One that has come for `session`: the worker is next. Where it computes, or the step does not fit, nothing is the answer."""
        if not self._reaches_worker:
            return
        if not self._batches.running and session.problem_with(step, body, max_waiting) is None:
            self._effects.work(Rehearse(work_item(session, step, len(body))), body)
