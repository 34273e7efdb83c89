"""Lets what was foreseen leave as soon as its numbers are there, before the core is told of them. The core decides all the same, right
after: that what it decides has left already saves a quarter of a hop's cost (docs/hop.md), and that it is the same is checked each time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from potluck.shard.core import ShardCore
from potluck.shard.effects import Effect
from potluck.shard.foresight import ForeseenAnswer, ForeseenArrival
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.work import BatchDone
from potluck.wire.work_frames import Buffer, frame_start


class Links(Protocol):
    """To other nodes: told what is about to come on them, and what is about to be sent."""

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        """`on_arrival` gets the body where that step is the next to come from the node; then it is delivered like any."""

    def send_foreseen(self, node: bytes, step: ForeseenStep, spent: bytes, body: bytes) -> bool:
        """False: nothing was sent, for want of a link."""


class Worker(Protocol):
    """Whoever computes."""

    def send_batch(self, start: Buffer, body: bytes) -> bool:
        """A RunBatch of which all but the body was encoded beforehand. False: nothing was sent, for want of a worker."""


class Ahead:
    """`look` when there is time, `on_answer` before the core hears it, `take_effects` whenever the core was told anything."""

    def __init__(self, core: ShardCore, worker: Worker, links: Links, on_contradiction: Callable[[], None]) -> None:
        """`on_contradiction`: the core has decided otherwise than what has left, which cannot be. It ends the worker and every session."""
        self._core, self._worker, self._links = core, worker, links
        self._on_contradiction = on_contradiction
        self._arrival: ForeseenArrival | None = None
        self._answer: tuple[ForeseenAnswer, ForeseenStep] | None = None
        self._left: Effect | None = None
        self.count = 0  # of what has left before it was decided, and was decided then

    def __repr__(self) -> str:
        foreseen = "an arrival" if self._arrival is not None else "an answer" if self._answer is not None else "nothing"
        return f"<Ahead, foresees {foreseen}>"

    def look(self) -> None:
        self.forget()
        foreseen = self._core.foresight.next()
        if isinstance(foreseen, ForeseenAnswer):
            self._answer = foreseen, ForeseenStep(foreseen.step, foreseen.stages, foreseen.body_bytes)
        elif isinstance(foreseen, ForeseenArrival):
            self._arrival = foreseen
            step = ForeseenStep(foreseen.step, foreseen.stages, foreseen.body_bytes)
            start = frame_start(foreseen.batch, foreseen.body_bytes)
            self._links.foresee(foreseen.sender, step, partial(self._on_arrival, foreseen, start))

    def forget(self) -> None:
        self._arrival = self._answer = None

    def _on_arrival(self, foreseen: ForeseenArrival, start: Buffer, body: bytes) -> None:
        """What the links were told holds only if nothing else has happened since."""
        if self._arrival is not foreseen:
            return
        self._arrival = None
        if self._worker.send_batch(start, body):
            self._left = foreseen.decision(body)

    def on_answer(self, message: BatchDone, body: bytes, now_s: float) -> None:
        """What the worker says, and the time that the core will be told."""
        if self._answer is None:
            return
        foreseen, step = self._answer
        numbers = foreseen.numbers(message, body, now_s)
        if numbers is not None and self._links.send_foreseen(foreseen.node, step, *numbers):
            self._left = foreseen.decision(*numbers)

    def take_effects(self) -> tuple[Effect | None, Sequence[Effect]]:
        """What the core has decided: what of it has left already, and what is to be carried out. What was foreseen holds no more."""
        self.forget()
        effects = self._core.take_effects()
        if self._left is None:
            return None, effects
        left, self._left = self._left, None
        if effects and effects[0] == left:
            self.count += 1
            return left, effects[1:]
        self._on_contradiction()  # heads have been told that their sessions are gone: nobody may go on from this decision either
        return None, ()
