"""Pipelines whose KV was left with the shards for a next request that begins with the same tokens: a conversation's next turn. Pure.

What is kept belongs to one caller: nobody's answer comes sooner because of what somebody else has asked.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from potluck.orchestrator.request import GenerationRequest
from potluck.planner.cover import Placed
from potluck.wire.messages import Boundary

LEAST_POSITIONS = 16  # below that, asking for it costs as much as it saves
_MOST_KEPT = 64
_LIFETIME_S = 600.0
ReuseKey = tuple[object, ...]


class Kept(NamedTuple):
    """The KV of `tokens` in sessions that have ended, one for each of `stages`, computed with these boundaries."""

    tokens: tuple[int, ...]
    stages: tuple[Placed, ...]
    sessions: tuple[bytes, ...]
    boundaries: tuple[Boundary, ...] = ()


class Resumption(NamedTuple):
    """A pipeline to go on with, whose first `length` positions are those of the request."""

    kept: Kept
    length: int

    def is_most_of(self, prompt: Sequence[int]) -> bool:
        return 2 * self.length >= len(prompt)


class _Entry(NamedTuple):
    key: ReuseKey
    kept: Kept
    since_s: float


class KeptPipelines:
    """What a head may go on with. Bounded; the oldest goes first. The caller releases what `put` gives back."""

    def __init__(self, most: int = _MOST_KEPT, lifetime_s: float = _LIFETIME_S) -> None:
        self._most, self._lifetime_s = most, lifetime_s
        self._entries: list[_Entry] = []  # oldest first

    def __repr__(self) -> str:
        return f"<KeptPipelines {len(self._entries)} of {self._most}>"

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: ReuseKey, kept: Kept, now_s: float) -> list[Kept]:
        """Whatever needs to be kept no more: earlier turns of the same conversation, and what is too old or too much."""
        staying, released = [], []
        for entry in self._entries:
            is_earlier_turn = entry.key == key and kept.tokens[: len(entry.kept.tokens)] == entry.kept.tokens
            is_over = is_earlier_turn or now_s - entry.since_s >= self._lifetime_s
            released.append(entry.kept) if is_over else staying.append(entry)
        self._entries = [*staying, _Entry(key, kept, now_s)]
        excess = max(0, len(self._entries) - self._most)
        released += [entry.kept for entry in self._entries[:excess]]
        del self._entries[:excess]
        return released

    def find(
        self, key: ReuseKey, prompt: Sequence[int], now_s: float, is_usable: Callable[[Kept], bool]
    ) -> Resumption | None:
        """The kept pipeline that shares most with a prompt. The prompt's last token is always computed: the first choice needs it."""
        best = None
        for entry in self._entries:
            if entry.key != key or now_s - entry.since_s >= self._lifetime_s:
                continue
            length = min(_common(entry.kept.tokens, prompt), len(prompt) - 1)
            if length >= LEAST_POSITIONS and (best is None or length > best.length) and is_usable(entry.kept):
                best = Resumption(entry.kept, length)
        return best

    def forget(self, node: bytes) -> None:
        """That node was lost, and its KV with it."""
        self._entries = [entry for entry in self._entries if all(placed.node != node for placed in entry.kept.stages)]


def reuse_key(request: GenerationRequest, activation_dtype: str) -> ReuseKey:
    """Requests with the same key compute the same KV for the same tokens, for the same owner."""
    exact = request.model, request.weights_sha256, request.arithmetic, request.boundaries, activation_dtype
    return *exact, request.owner


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    most = min(len(one), len(other))
    return next((index for index in range(most) if one[index] != other[index]), most)
