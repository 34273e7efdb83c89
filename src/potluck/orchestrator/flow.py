"""How much may be under way: chunks of the journal in the pipeline, and tokens that the reader has not taken. Pure.

Counts positions and tokens; knows neither what they are nor which stages they go to.
"""

import math
from collections import deque
from typing import NamedTuple

from potluck.orchestrator.request import GenerationSettings
from potluck.wire.messages import MAX_STEP_TOKENS

# What a chunk costs beside its tokens, in tokens: weights are read once more, and messages sent. The same for small models and large ones.
_CHUNK_COST = 2.5
_SHORTEST_CHUNK, _CHUNK_STEP = 16, 16
_CHUNKS_WAITING = 2
MOST_CHUNKS_UNDER_WAY = 32  # with as many steps of a replay they fit into a shard's queue


class Chunk(NamedTuple):
    """Positions start … stop - 1; `chooses`: a token is wanted after the last."""

    start: int
    stop: int
    chooses: bool


class Flow:
    """`sent` positions have gone out in this epoch. The ring feeds itself after the prompt, on credit that the reader earns."""

    def __init__(
        self, settings: GenerationSettings, *, wants_tokens: bool = True, longest_chunk: int | None = None
    ) -> None:
        self._settings, self._wants_tokens = settings, wants_tokens
        self._longest_chunk = min(settings.prefill_chunk, longest_chunk or MAX_STEP_TOKENS)
        self.sent = self._began = 0
        self._stages, self._cuts_short = 1, False
        self.unread = 0
        self.is_ring_running = False
        self._in_flight: deque[int] = deque()  # where each chunk that has not come back ends
        self._credit_owed = 0

    def __repr__(self) -> str:
        return f"<Flow sent {self.sent}, {len(self._in_flight)} in flight, {self.unread} unread>"

    def stop(self) -> None:
        """A new epoch is being formed: what was under way does not count any more."""
        self._in_flight.clear()
        self.is_ring_running = False

    def restart(self, confirmed: int, stages: int = 1, *, cuts_short: bool = False) -> int:
        """All stages have `confirmed` positions. Gives the credit to begin with. `cuts_short`: they are quicker with short chunks."""
        self.sent = self._began = confirmed
        self._stages, self._cuts_short = stages, cuts_short
        if not self._settings.uses_ring:
            return 0
        self._credit_owed = 0
        return max(1, self._settings.ring_credits - self.unread)

    def take_due(self, length: int) -> list[Chunk]:
        """What the pipeline is to get now of a journal of `length` tokens: a few chunks ahead; then the ring takes over."""
        settings, chunks = self._settings, []
        longest = self._best_chunk(length - self._began)
        window = min(settings.prefill_window or self._stages + _CHUNKS_WAITING, MOST_CHUNKS_UNDER_WAY)
        while (
            self.sent < length
            and len(self._in_flight) < window
            and not self.is_ring_running
            and (settings.uses_ring or self.unread < settings.ring_credits)
        ):
            stop = min(self.sent + longest, length)
            chooses = stop == length and self._wants_tokens
            chunks.append(Chunk(self.sent, stop, chooses))
            self._in_flight.append(stop)
            self.sent = stop
            self.is_ring_running = chooses and settings.uses_ring
        return chunks

    def _best_chunk(self, length: int) -> int:
        """The last of several stages is idle while the first chunk is on its way to it: short chunks, but not so many that they cost more.

        Of n tokens in chunks of c over k stages, (n / c + k - 1) · (c + cost) is to be least.
        """
        if self._stages == 1 or not self._cuts_short:
            return self._longest_chunk
        best = math.sqrt(_CHUNK_COST * length / (self._stages - 1))
        return min(self._longest_chunk, max(_SHORTEST_CHUNK, round(best / _CHUNK_STEP) * _CHUNK_STEP))

    def arrived(self, position: int) -> None:
        """Every stage has everything below `position`."""
        in_flight = self._in_flight
        while in_flight and in_flight[0] <= position:
            in_flight.popleft()

    def read(self, count: int, *, is_running: bool) -> int:
        """The reader has taken `count` tokens. Gives the credit that is due now: half of it at a time, and only to a ring that runs."""
        self.unread -= count
        self._credit_owed += count
        if not is_running or self._credit_owed < max(1, self._settings.ring_credits // 2):
            return 0
        credit, self._credit_owed = self._credit_owed, 0
        return credit if self._settings.uses_ring else 0

    def is_reader_slow(self) -> bool:
        """No progress because the reader does not read: nobody's fault."""
        owed = self._credit_owed if self._settings.uses_ring else 0  # read, and not yet told to the ring
        return self.unread + owed >= self._settings.ring_credits
