"""The public face of routing, under HearthNet's names: descriptors of shards, pipelines of them, picks and repicks, health.

A descriptor's range is inclusive, as people see it. The orchestrator itself works on the planner's types; these are for callers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from potluck.core.errors import BadRequest, ShardUnavailable, WeightsMismatch
from potluck.core.limits import DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S, MAX_SHARDS_PER_REQUEST
from potluck.core.shard_health import LatencyWindow, ShardHealth
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
    def of(cls, info: ShardInfo, stage: Stage, node: bytes, address: str, advertised_at: datetime) -> "ShardDescriptor":
        return cls(
            f"{info.model}:{stage.start}-{stage.stop - 1}", info.model, info.weights_sha256, (stage.start, stage.stop - 1),
            info.vram_mb, info.max_streams, node.hex(), address, advertised_at,
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
        """Raises BadRequest (unknown model), WeightsMismatch, ShardUnavailable (some layer has no holder, or only full ones)."""
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
        wanted = Stage(0, info.layer_count, True, True)
        others = [candidate for candidate in candidates if candidate.node not in excluded]
        usable = [candidate for candidate in others if not candidate.is_full]
        placed = greedy_cover(usable, wanted)
        if placed is None and greedy_cover(others, wanted) is not None:
            raise ShardUnavailable(f"every holder of some layers of {info.model} has as many streams as it takes")
        if placed is None:
            raise self._store.gap(info.model, info.weights_sha256, info.layer_count, allows_own=allows_own)
        if len(placed) > self._settings.max_shards_per_request:
            raise ShardUnavailable(
                f"{len(placed)} shards would be needed, more than {self._settings.max_shards_per_request}"
            )
        return self._pipeline(info, placed, usable)

    def _pipeline(self, info: ShardInfo, placed: Sequence[Placed], candidates: Sequence[Candidate]) -> Pipeline:
        addresses = {candidate.node: candidate.address for candidate in candidates}
        shards = [
            ShardDescriptor.of(info, part.stage, part.node, addresses[part.node], self._store.heard_at(part.node))
            for part in placed
        ]
        name = "+".join(f"{shard.host[:8]}:{shard.layer_range[0]}-{shard.layer_range[1]}" for shard in shards)
        return Pipeline(name, info.model, info.weights_sha256, info.layer_count, shards)


class ShardHealthTracker:
    """Which shards have given results when, and how fast, as one head has seen them. Times are on the caller's monotonic clock.

    Bounded: the shard that was not heard of for longest is forgotten first.
    """

    _MOST_SHARDS = 1024

    def __init__(self, timeout_s: float = DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._seen_s: dict[str, float] = {}  # longest ago first
        self._latencies: dict[str, LatencyWindow] = {}

    def __repr__(self) -> str:
        return f"<ShardHealthTracker {len(self._seen_s)} shards>"

    def note(self, shard_id: str, latency_ms: float, now_s: float) -> None:
        self._seen_s.pop(shard_id, None)
        self._seen_s[shard_id] = now_s
        if (latencies := self._latencies.get(shard_id)) is None:
            latencies = self._latencies[shard_id] = LatencyWindow()
        latencies.note(latency_ms)
        if len(self._seen_s) > self._MOST_SHARDS:
            oldest = next(iter(self._seen_s))
            del self._seen_s[oldest], self._latencies[oldest]

    def is_online(self, shard_id: str, now_s: float) -> bool:
        seen = self._seen_s.get(shard_id)
        return seen is not None and now_s - seen <= self._timeout_s

    def p95_latency_ms(self, shard_id: str) -> float:
        return self._latencies[shard_id].p95_ms if shard_id in self._latencies else 0.0

    def all(self, now_s: float) -> list[ShardHealth]:
        """Of every shard that gave anything, whoever was heard of last comes last."""
        return [health for shard_id in self._seen_s if (health := self.health(shard_id, now_s)) is not None]

    def health(self, shard_id: str, now_s: float, queue_depth: int = 0) -> ShardHealth | None:
        """What is known of a shard; None where it never gave anything."""
        seen = self._seen_s.get(shard_id)
        if seen is None:
            return None
        last_seen = datetime.now(UTC) - timedelta(seconds=now_s - seen)
        is_online, latency_ms = self.is_online(shard_id, now_s), self.p95_latency_ms(shard_id)
        return ShardHealth(shard_id, is_online, last_seen, latency_ms, queue_depth)
