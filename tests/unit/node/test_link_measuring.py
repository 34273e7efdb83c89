"""Measuring the way to a peer: some chunks of what it holds, bounded, one measurement at a time."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from potluck.core.errors import BadRequest, PotluckError, ShardUnavailable
from potluck.node.bulk_peer import WeightSource
from potluck.node.link_measuring import MOST_BYTES, LinkMeasuring
from tests.unit.node.test_weight_fetch import Bench
from tests.unit.node.test_weight_fetch import play_scene as play

Scene = Callable[[Bench], Coroutine[Any, Any, None]]


def test_chunks_come_are_counted_and_nothing_is_kept(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        node = await bench.source(bench.offered())
        measuring = LinkMeasuring(bench.fetcher.transport)
        measured = await measuring.measure(bench.sources[0], bench.whole.entry.weights_sha256)
        assert measured.node == node.id.hex()
        assert 0 < measured.size_bytes <= MOST_BYTES
        assert measured.mbit_s > 0
        assert bench.store.list() == ()

    play(scene, tmp_path)


def test_a_peer_without_the_model_or_without_a_door_is_said_to_be(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        await bench.source(None)
        measuring = LinkMeasuring(bench.fetcher.transport)
        with pytest.raises(ShardUnavailable, match="model_not_found"):
            await measuring.measure(bench.sources[0], "ab" * 32)
        with pytest.raises(PotluckError):
            await measuring.measure(WeightSource(b"x" * 32, "memory:99"), "ab" * 32)

    play(scene, tmp_path)


def test_one_at_a_time(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        await bench.source(bench.offered())
        measuring = LinkMeasuring(bench.fetcher.transport)
        weights = bench.whole.entry.weights_sha256
        first = asyncio.ensure_future(measuring.measure(bench.sources[0], weights))
        await asyncio.sleep(0)
        with pytest.raises(BadRequest, match="under way"):
            await measuring.measure(bench.sources[0], weights)
        await first
        await measuring.measure(bench.sources[0], weights)

    play(scene, tmp_path)
