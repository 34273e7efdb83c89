"""Who may start now, who waits, who is sent away: a bounded, fair queue. Decides only; no I/O, no clock.

Tiers are SwarmLLM's: a request starts while less than ¼, ½, 1 or 2 × `max_concurrent_requests` are running. Clients take turns;
every completion says at once who is next.
"""

import enum
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec


class Tier(enum.Enum):
    """The share of `max_concurrent_requests` that may be busy for a request of this tier to start."""

    BRONZE = 0.25
    SILVER = 0.5
    GOLD = 1.0
    PLATINUM = 2.0


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_concurrent_requests: int = 16  # as many as a shard takes sessions
    max_waiting: int = 128
    max_waiting_per_client: int = 64
    patience_s: float = 60.0  # for a turn; then 503
    max_sessions: int | None = None  # of all requests together, whatever their tier; None: as the tiers have it


class Verdict(NamedTuple):
    outcome: Literal["start", "wait", "refuse"]
    retry_after_s: int = 0


@dataclass(frozen=True)
class _Request:
    ticket: int
    client: str
    tier: Tier
    cost: int  # sessions that it uses at once


@dataclass
class _Started:
    cost: int
    since_s: float


class Admission:
    """`arrive`, then either `leave` (it had started) or `give_up` (it still waited), exactly once for each ticket."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self._running: dict[int, _Started] = {}
        self._busy = 0
        self._waiting: OrderedDict[str, deque[_Request]] = OrderedDict()  # the client whose turn it is comes first
        self._waiting_count = 0
        self._usual_s = 1.0

    def __repr__(self) -> str:
        return (
            f"<Admission {len(self._running)} running, {self._waiting_count} waiting of {len(self._waiting)} clients>"
        )

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    def arrive(self, ticket: int, client: str, tier: Tier, cost: int, now_s: float) -> Verdict:
        request = _Request(ticket, client, tier, cost)
        if not self._is_anybody_before(tier) and self._fits(request):
            self._start(request, now_s)
            return Verdict("start")
        own = len(self._waiting.get(client, ()))
        if self._waiting_count >= self.settings.max_waiting or own >= self.settings.max_waiting_per_client:
            return Verdict("refuse", self.retry_after_s())
        self._waiting.setdefault(client, deque()).append(request)
        self._waiting_count += 1
        return Verdict("wait")

    def leave(self, ticket: int, now_s: float) -> list[int]:
        """A request has ended; returns those that start now."""
        started = self._running.pop(ticket)
        self._busy -= started.cost
        self._usual_s += 0.1 * (max(now_s - started.since_s, 0.0) - self._usual_s)
        return self._next(now_s)

    def give_up(self, ticket: int, now_s: float) -> list[int]:
        """A request that waited has gone; returns those that start now because it stood in their way."""
        for client, queue in self._waiting.items():
            for request in queue:
                if request.ticket == ticket:
                    queue.remove(request)
                    self._waiting_count -= 1
                    if not queue:
                        del self._waiting[client]
                    return self._next(now_s)
        return []

    def retry_after_s(self) -> int:
        """When a place in the queue is likely to be free."""
        rounds = (self._waiting_count + 1) / self.settings.max_concurrent_requests
        return min(60, max(1, math.ceil(rounds * self._usual_s)))

    def _is_anybody_before(self, tier: Tier) -> bool:
        """Whether somebody of at least this tier waits already."""
        return any(queue[0].tier.value >= tier.value for queue in self._waiting.values())

    def _fits(self, request: _Request) -> bool:
        cap = max(1, math.floor(request.tier.value * self.settings.max_concurrent_requests))
        cap = cap if self.settings.max_sessions is None else min(cap, self.settings.max_sessions)
        return self._busy + request.cost <= cap or not self._running  # a large one alone is better than never

    def _start(self, request: _Request, now_s: float) -> None:
        self._running[request.ticket] = _Started(request.cost, now_s)
        self._busy += request.cost

    def _next(self, now_s: float) -> list[int]:
        started: list[int] = []
        while (request := self._take_next()) is not None:
            self._start(request, now_s)
            started.append(request.ticket)
        return started

    def _take_next(self) -> _Request | None:
        """The first in turn whose tier lets it start; its client goes to the end of the row."""
        for client, queue in self._waiting.items():
            if self._fits(queue[0]):
                request = queue.popleft()
                self._waiting_count -= 1
                if queue:
                    self._waiting.move_to_end(client)
                else:
                    del self._waiting[client]
                return request
        return None
