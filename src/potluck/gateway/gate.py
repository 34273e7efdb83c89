"""The admission queue with waiting: requests sleep until it is their turn, and a completion wakes the next at once."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from potluck.core.errors import Overloaded, QueueFull
from potluck.gateway.admission import Admission, AdmissionSettings, Tier


class Gate:
    """`async with gate.turn(…)`: inside, the request runs."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.admission = Admission(settings)
        self._tickets = itertools.count()
        self._sleepers: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, client: str, tier: Tier, cost: int) -> AsyncIterator[None]:
        """Raises QueueFull where too many wait, and Overloaded where the turn does not come in time."""
        ticket = next(self._tickets)
        verdict = self.admission.arrive(ticket, client, tier, cost, _now_s())
        if verdict.outcome == "refuse":
            raise QueueFull("too many requests wait already; try again later", verdict.retry_after_s)
        if verdict.outcome == "wait":
            await self._sleep(ticket)
        try:
            yield
        finally:
            self._wake(self.admission.leave(ticket, _now_s()))

    async def _sleep(self, ticket: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers[ticket] = turn
        try:
            async with asyncio.timeout(self.admission.settings.patience_s):
                await turn
        except BaseException as error:
            # Its turn may have come in the same moment: then it had started, and must leave rather than give up.
            has_started = turn.done() and not turn.cancelled()
            now = _now_s()
            self._wake(self.admission.leave(ticket, now) if has_started else self.admission.give_up(ticket, now))
            if isinstance(error, TimeoutError):
                wait_s = self.admission.retry_after_s()
                raise Overloaded("no turn came in time; try again later", wait_s) from None
            raise
        finally:
            self._sleepers.pop(ticket, None)

    def _wake(self, tickets: list[int]) -> None:
        for ticket in tickets:
            turn = self._sleepers[ticket]
            if turn.done():  # cancelled in this very moment, and not yet run: hand its turn on
                self._wake(self.admission.leave(ticket, _now_s()))
            else:
                turn.set_result(None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
