"""HearthNet §4.4 by its public names: `ShardRouter.pick / repick` over a `ShardStore`, descriptors, health, and what is refused how."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import potluck
from potluck import Pipeline, ShardDescriptor, ShardHealth, ShardHealthTracker, ShardRouter, ShardStore
from potluck.core.errors import BadRequest, ShardUnavailable, WeightsMismatch
from potluck.orchestrator.router import RoutingSettings
from potluck.wire.messages import Described, ShardInfo, Stage

LAYERS = 16
WEIGHTS = "a" * 64


def info(lo: int, hi: int, *, weights: str = WEIGHTS, streams: int = 0, depth: int = 0) -> ShardInfo:
    stage = Stage(lo, hi + 1, lo == 0, hi == LAYERS - 1)
    return ShardInfo("m", weights, 1, LAYERS, stage, True, 4, streams, depth, 10)


def node(number: int) -> bytes:
    return bytes([number]) * 32


def store_of(*offers: tuple[int, ShardInfo], own: int | None = None) -> ShardStore:
    store = ShardStore()
    for number, shard in offers:
        described = Described(0, node(number), "1", (shard,), 1, (2,))
        store.put(node(number), f"node:{number}", described, is_own=number == own)
    return store


def pick(store: ShardStore, settings: RoutingSettings | None = None) -> Pipeline:
    return asyncio.run(ShardRouter(store, settings).pick("m", WEIGHTS))


def shape(pipeline: Pipeline) -> list[tuple[int, str]]:
    return [(bytes.fromhex(shard.host)[0], shard.shard_id) for shard in pipeline.ordered_shards]


THREE = ((1, info(0, 7)), (2, info(4, 11)), (3, info(8, 15)))


def test_pick_covers_the_model_and_describes_what_it_picked() -> None:
    before = datetime.now(UTC)
    pipeline = pick(store_of(*THREE))
    assert shape(pipeline) == [(1, "m:0-7"), (3, "m:8-15")]
    assert (pipeline.model_id, pipeline.weights_sha256, pipeline.total_layers) == ("m", WEIGHTS, LAYERS)
    first = pipeline.ordered_shards[0]
    assert isinstance(first, ShardDescriptor)
    assert (first.layer_range, first.max_concurrent_streams, first.endpoint) == ((0, 7), 4, "node:1")
    assert before <= first.advertised_at <= pipeline.established_at


def test_repick_leaves_out_the_hosts_of_the_shards_that_are_excluded() -> None:
    store = store_of(*THREE, (4, info(0, 7, depth=9)))
    pipeline = pick(store)
    again = asyncio.run(ShardRouter(store).repick(pipeline, exclude={"m:0-7"}))
    assert shape(again) == [(4, "m:0-7"), (3, "m:8-15")]


def test_a_shard_at_its_limit_is_passed_over_and_not_queued_at() -> None:
    assert shape(pick(store_of((1, info(0, 15, streams=4)), (2, info(0, 15, depth=9))))) == [(2, "m:0-15")]
    with pytest.raises(ShardUnavailable, match="as many streams as it takes"):
        pick(store_of((1, info(0, 15, streams=4))))


def test_a_shard_on_the_lan_comes_before_one_at_a_public_address() -> None:
    """HearthNet §5.2: of two that are equally idle. Names and VPNs count as near."""
    for far, near in (
        ("93.184.216.34:1", "192.168.0.7:1"),
        ("[2606:4700::1]:1", "100.64.3.4:1"),
        ("8.8.8.8:1", "nas:1"),
    ):
        store = ShardStore()
        for number, address in ((1, far), (2, near)):
            store.put(node(number), address, Described(0, node(number), "1", (info(0, 15),), 1, (2,)))
        assert shape(pick(store)) == [(2, "m:0-15")]
        store.put(node(1), "10.0.0.1:1", Described(0, node(1), "1", (info(0, 15),), 1, (2,)))
        assert shape(pick(store)) == [(1, "m:0-15")]  # it has moved, and ids break ties


def test_oneself_is_no_shard_unless_allowed() -> None:
    store = store_of((1, info(0, 15)), own=1)
    with pytest.raises(ShardUnavailable, match=r"no shard holds layer 0, 1, .*; this machine's own may not be used"):
        pick(store)
    assert shape(pick(store, RoutingSettings(allow_self_as_shard=True))) == [(1, "m:0-15")]


def test_every_refusal_has_hearthnets_code() -> None:
    with pytest.raises(BadRequest, match="nobody serves a model called m"):
        pick(store_of())
    with pytest.raises(WeightsMismatch):
        pick(store_of((1, info(0, 15, weights="b" * 64))))
    with pytest.raises(ShardUnavailable, match="no shard holds layer 8, 9"):
        pick(store_of((1, info(0, 7))))
    with pytest.raises(ShardUnavailable, match="2 shards would be needed, more than 1"):
        pick(store_of(*THREE), RoutingSettings(max_shards_per_request=1))


# ---------------------------------------------------------------- health


def test_health_is_the_95th_percentile_of_what_was_seen_and_goes_stale() -> None:
    tracker = ShardHealthTracker(timeout_s=30.0)
    for number in range(1, 101):
        tracker.note("m:0-7", float(number), 10.0)
    health = tracker.health("m:0-7", 15.0, queue_depth=3)
    assert isinstance(health, ShardHealth)
    assert (health.online, health.p95_latency_ms, health.queue_depth) == (True, 96.0, 3)
    assert timedelta(seconds=4) < datetime.now(UTC) - health.last_seen < timedelta(seconds=60)
    assert not tracker.is_online("m:0-7", 40.1)
    assert (tracker.health("m:8-15", 15.0), tracker.p95_latency_ms("m:8-15")) == (None, 0.0)
    tracker.note("m:8-15", 1.0, 41.0)
    assert [(each.shard_id, each.online) for each in tracker.all(41.0)] == [("m:0-7", False), ("m:8-15", True)]


def test_health_forgets_whoever_was_not_heard_of_for_longest() -> None:
    tracker = ShardHealthTracker()
    for number in range(1100):
        tracker.note(f"m:{number}-{number}", 1.0, float(number))
    assert tracker.health("m:0-0", 1100.0) is None
    assert tracker.health("m:1099-1099", 1100.0) is not None


def test_every_name_that_hearthnet_fixes_can_be_imported() -> None:
    fixed = (
        "ShardDescriptor", "Pipeline", "ShardHealth", "ShardServer", "PipelineOrchestrator", "ShardRouter", "ShardStore",
        "ShardHealthTracker", "DistributedChatParams", "StreamFrame", "ShardSettings",
    )  # fmt: skip
    assert [name for name in fixed if not hasattr(potluck, name)] == []
