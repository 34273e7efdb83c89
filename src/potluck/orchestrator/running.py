"""A generation that runs: its reader's frames, its timer, and what is counted and shown of it."""

import asyncio
import time

from potluck.orchestrator.frames import Finished, ShardFailover, ShardStatus, StreamFrame, TokenDelta
from potluck.orchestrator.generation import Generation, Phase
from potluck.orchestrator.params import DistributedChatParams
from potluck.orchestrator.watching import StageTimings, Watched
from potluck.telemetry.metrics import Metrics


class Running:
    """One generation and its reader."""

    def __init__(self, generation: Generation, label: str, params: DistributedChatParams) -> None:
        self.generation, self.label, self.params = generation, label, params
        self.timings = StageTimings()
        self.frames: asyncio.Queue[StreamFrame] = asyncio.Queue()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_s = 0.0
        self._began_s = self._first_s = time.monotonic()
        self._tokens = 0
        self._has_fallen_back = self._has_told_formed = False

    @property
    def has_begun(self) -> bool:
        """Whether its reader has had a token."""
        return self._tokens > 0

    def drop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def note(self, frame: StreamFrame, metrics: Metrics) -> None:
        """Counts what a frame tells; nothing of its content. Afterwards it may have begun."""
        now = time.monotonic()
        if self.generation.formed_s is not None and not self._has_told_formed:
            self._has_told_formed = True
            metrics.pipeline_construct_ms.observe((self.generation.formed_s - self._began_s) * 1000)
        if isinstance(frame, TokenDelta):
            self._tokens += 1
            if self._tokens == 1:
                self._first_s = now
                metrics.first_token_ms.observe((now - self._began_s) * 1000)
        elif isinstance(frame, ShardFailover):
            metrics.failovers.inc()
            metrics.failover_pause_ms.observe(frame.pause_ms)
            if self.generation.fell_back and not self._has_fallen_back:
                self._has_fallen_back = True
                metrics.fallback_to_local.inc()
        elif isinstance(frame, ShardStatus) and frame.code == "shard_corruption":
            metrics.shard_corruption_detected.labels(node=frame.node[:16]).inc()
        elif isinstance(frame, Finished):
            metrics.reused_tokens.inc(frame.reused_tokens)
            if self._tokens > 1:
                metrics.tokens_per_second.set((self._tokens - 1) / max(now - self._first_s, 1e-9))

    def watched(self) -> Watched:
        generation, now = self.generation, time.monotonic()
        elapsed_s = max(now - self._first_s, 1e-9)
        return Watched(
            self.label, generation.request.model, self._phase(), self._tokens,
            round((self._tokens - 1) / elapsed_s, 2) if self._tokens > 1 else 0.0, generation.failovers, generation.stages,
            self.timings.shown(),
        )  # fmt: skip

    def _phase(self) -> str:
        phase = self.generation.phase
        if phase is Phase.WAITING or (phase is Phase.FORMING and self._tokens):
            return "recovering"
        if phase in (Phase.NEW, Phase.FORMING):
            return "queued"
        return "decode" if self._tokens else "prefill"
