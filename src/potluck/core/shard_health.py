"""How a shard is, and what its latencies come to: HearthNet §4.1's `ShardHealth`. Pure data; times come in as arguments."""

from collections import deque
from datetime import datetime

import msgspec


class ShardHealth(msgspec.Struct, frozen=True):
    """How a shard is, for whoever may ask. `p95_latency_ms`: of its last steps, from arrival to output; 0 where there were none."""

    shard_id: str
    online: bool
    last_seen: datetime
    p95_latency_ms: float
    queue_depth: int


class LatencyWindow:
    """The last 256 latencies of one shard."""

    def __init__(self) -> None:
        self._latencies_ms: deque[float] = deque(maxlen=256)

    def __repr__(self) -> str:
        return f"<LatencyWindow {len(self._latencies_ms)} steps, p95 {self.p95_ms:.2f} ms>"

    def note(self, latency_ms: float) -> None:
        self._latencies_ms.append(latency_ms)

    @property
    def p95_ms(self) -> float:
        ordered = sorted(self._latencies_ms)
        return ordered[int(len(ordered) * 0.95)] if ordered else 0.0
