"""The public face of routing, under HearthNet's names: descriptors of shards, pipelines of them, picks and repicks, health.

A descriptor's range is inclusive, as people see it. The orchestrator itself works on the planner's types; these are for callers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from potluck.core.errors import BadRequest, ShardUnavailable, WeightsMismatch
from potluck.core.limits import MAX_SHARDS_PER_REQUEST
from potluck.orchestrator.routing import ShardStore
from potluck.planner.cover import Candidate, Placed, greedy_cover
from potluck.wire.messages import ShardInfo, Stage


@dataclass(frozen=True)
class ShardDescriptor:
    """A shard on offer, or a part of one in a pipeline."""

    shard_id: str  # "<model_id>:<lo>-<hi>"
    model_id: str
    weights_sha256: str
    layer_range: tuple[int, int]  # inclusive
    vram_required_mb: int
    max_concurrent_streams: int
    host: str  # the node's id, in hexadecimal
    endpoint: str
    advertised_at: datetime

    @classmethod
    def of(cls, info: ShardInfo, stage: Stage, node: bytes, address: str) -> "ShardDescriptor":
        return cls(
            f"{info.model}:{stage.start}-{stage.stop - 1}", info.model, info.weights_sha256, (stage.start, stage.stop - 1), 0,
            info.max_streams, node.hex(), address, datetime.now(UTC),
        )  # fmt: skip


@dataclass
class Pipeline:
    """Shards that together are a whole model, in order. Made for one call, never kept."""

    pipeline_id: str
    model_id: str
    weights_sha256: str
    total_layers: int
    ordered_shards: list[ShardDescriptor]
    established_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class RoutingSettings:
    max_shards_per_request: int = MAX_SHARDS_PER_REQUEST
    allow_self_as_shard: bool = False


class ShardRouter:
    """Picks covering shards: HearthNet's greedy cover over what the store has."""

    def __init__(self, store: ShardStore, settings: RoutingSettings | None = None) -> None:
        self._store, self._settings = store, settings or RoutingSettings()

    async def pick(self, model_id: str, weights_sha256: str) -> Pipeline:
        """Raises BadRequest (unknown model), WeightsMismatch, ShardUnavailable (some layer has no holder)."""
        return self._cover(self._info(model_id, weights_sha256), frozenset())

    async def repick(self, pipeline: Pipeline, exclude: set[str]) -> Pipeline:
        """Another pipeline for the same model, without the shards (by id and host) of `pipeline` that `exclude` names."""
        hosts = frozenset(bytes.fromhex(shard.host) for shard in pipeline.ordered_shards if shard.shard_id in exclude)
        return self._cover(self._info(pipeline.model_id, pipeline.weights_sha256), hosts)

    def _info(self, model_id: str, weights_sha256: str) -> ShardInfo:
        known = self._store.models()
        if (model_id, weights_sha256) in known:
            return known[model_id, weights_sha256]
        if any(name == model_id for name, _ in known):
            raise WeightsMismatch(f"nobody holds {model_id} with weights {weights_sha256[:12]}")
        raise BadRequest(f"nobody serves a model called {model_id}")

    def _cover(self, info: ShardInfo, excluded: frozenset[bytes]) -> Pipeline:
        allows_own = self._settings.allow_self_as_shard
        candidates = self._store.candidates(info.weights_sha256, info.arithmetic, allows_own)
        usable = [candidate for candidate in candidates if candidate.node not in excluded]
        placed = greedy_cover(usable, Stage(0, info.layer_count, True, True))
        if placed is None:
            raise ShardUnavailable(self._store.explain_gap(info.model, info.weights_sha256, info.layer_count))
        if len(placed) > self._settings.max_shards_per_request:
            raise ShardUnavailable(
                f"{len(placed)} shards would be needed, more than {self._settings.max_shards_per_request}"
            )
        return self._pipeline(info, placed, usable)

    def _pipeline(self, info: ShardInfo, placed: Sequence[Placed], candidates: Sequence[Candidate]) -> Pipeline:
        addresses = {candidate.node: candidate.address for candidate in candidates}
        shards = [ShardDescriptor.of(info, part.stage, part.node, addresses[part.node]) for part in placed]
        name = "+".join(f"{shard.host[:8]}:{shard.layer_range[0]}-{shard.layer_range[1]}" for shard in shards)
        return Pipeline(name, info.model, info.weights_sha256, info.layer_count, shards)


class ShardHealthTracker:
    """Who was seen when, and how fast: a window of latencies per shard. Times are on the caller's monotonic clock."""

    _WINDOW = 256

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen_s: dict[str, float] = {}
        self._latencies_ms: dict[str, deque[float]] = {}

    def note(self, shard_id: str, latency_ms: float, now_s: float) -> None:
        self._seen_s[shard_id] = now_s
        self._latencies_ms.setdefault(shard_id, deque(maxlen=self._WINDOW)).append(latency_ms)

    def is_online(self, shard_id: str, now_s: float) -> bool:
        seen = self._seen_s.get(shard_id)
        return seen is not None and now_s - seen <= self._timeout_s

    def p95_latency_ms(self, shard_id: str) -> float:
        latencies = sorted(self._latencies_ms.get(shard_id, ()))
        return latencies[int(len(latencies) * 0.95)] if latencies else 0.0
