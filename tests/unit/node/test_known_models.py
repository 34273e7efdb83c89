"""Manifests of models whose weights are elsewhere: asked for over links of their own, of slow peers too, and checked."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck.net.peers import MAX_BULK_LINKS
from potluck.node import known_models
from potluck.node.known_models import KnownModels
from potluck.node.node import Node
from potluck.node.weight_fetch import WeightSource
from potluck.node.weight_server import OfferedWeights
from potluck.testing.memory_answering import byte_tokenizer
from potluck.weights.manifest import encode_manifest, tokenizer_sha256, weights_sha256
from potluck.wire.messages import Describe
from tests.unit.node.test_weight_fetch import Bench, hold_back, play_scene, until

Scene = Callable[[Bench, KnownModels], Coroutine[Any, Any, None]]
Play = Callable[[Scene], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a scene; afterwards no task and no link of it is left."""
    monkeypatch.setattr(known_models, "_ASK_AGAIN_S", 0.0)

    async def look(scene: Scene, bench: Bench) -> None:
        await scene(bench, KnownModels(bench.fetcher, bench.store, asyncio.get_running_loop().time))
        await until(lambda: not any(node.links._bulk_links for node in bench.nodes))

    return lambda scene: play_scene(lambda bench: look(scene, bench), tmp_path)


def offered(bench: Bench) -> OfferedWeights:
    """The tiny model with a tokenizer, which heads could not do without."""
    spec = byte_tokenizer().spec
    manifest = msgspec.structs.replace(bench.whole.manifest, tokenizer_sha256=tokenizer_sha256(spec))
    return msgspec.structs.replace(
        bench.offered(), weights_sha256=weights_sha256(manifest), manifest=encode_manifest(manifest),
        tokenizer=msgspec.json.encode(spec),
    )  # fmt: skip


async def asked(bench: Bench, known: KnownModels) -> bool:
    wanted = offered(bench)
    assert known.begin_looking(wanted.weights_sha256)
    has_come = await known.ask_for_manifest(wanted.weights_sha256, bench.sources)
    assert known.manifest(wanted.weights_sha256) == (wanted.manifest if has_come else None)
    return has_come


def has_ordinary_link(node: Node) -> bool:
    return bool(node.links._links)


def test_a_holder_that_is_not_linked_is_asked_over_a_link_for_that(play: Play) -> None:
    async def scene(bench: Bench, known: KnownModels) -> None:
        source = await bench.source(offered(bench))
        assert await asked(bench, known)
        assert not has_ordinary_link(source)

    play(scene)


def test_a_slow_holder_is_given_a_minute_and_no_more(play: Play) -> None:
    async def scene(bench: Bench, known: KnownModels) -> None:
        source = await bench.source(offered(bench))
        for seconds, is_in_time in ((50.0, True), (70.0, False)):
            known._manifests.clear()
            asking = asyncio.ensure_future(asked(bench, known))
            await hold_back(bench, source, seconds)
            assert await asking == is_in_time
            await until(lambda: not source.links._bulk_links)

    play(scene)


def altered(whole: OfferedWeights, field: str) -> OfferedWeights:
    data: bytes = getattr(whole, field)
    other = data.replace(b'"', b"'", 1) if field == "manifest" else b"null"
    assert other != data
    return msgspec.structs.replace(whole, **{field: other})


@pytest.mark.parametrize("field", ["manifest", "tokenizer"])
def test_what_the_hash_does_not_cover_is_not_taken_and_the_next_holder_is_asked(play: Play, field: str) -> None:
    async def scene(bench: Bench, known: KnownModels) -> None:
        await bench.source(altered(offered(bench), field))
        assert not await asked(bench, known)
        await bench.source(offered(bench))
        assert await asked(bench, known)

    play(scene)


def test_who_has_nothing_or_is_not_there_is_passed_over(play: Play) -> None:
    async def scene(bench: Bench, known: KnownModels) -> None:
        await bench.source(None)
        bench.sources.append(WeightSource(b"x" * 32, "memory:nowhere"))
        assert not await asked(bench, known)
        await bench.source(offered(bench))
        assert await asked(bench, known)

    play(scene)


def test_a_linked_holder_that_cannot_be_dialled_is_asked_over_its_link(play: Play) -> None:
    async def scene(bench: Bench, known: KnownModels) -> None:
        source = await bench.source(offered(bench))
        await source.links.connect(await bench.fetcher.listen("memory:0"), bench.fetcher.id)
        source.links.send(bench.fetcher.id, None, Describe(1))  # who speaks is linked
        await until(lambda: bench.fetcher.links.is_linked(source.id))
        bench.sources = [WeightSource(source.id, "memory:nowhere")]
        assert await asked(bench, known)

    play(scene)


def test_a_holder_keeps_links_for_its_weights_however_many_manifests_are_wanted(play: Play) -> None:
    async def scene(bench: Bench, known: KnownModels) -> None:
        source = await bench.source(offered(bench))
        wanted = [f"{number:064x}" for number in range(8)]
        assert all(known.begin_looking(weights) for weights in wanted)
        most = 0
        asking = asyncio.gather(*(known.ask_for_manifest(weights, bench.sources) for weights in wanted))
        while not asking.done():
            most = max(most, len(source.links._bulk_links.get(bench.fetcher.id, ())))
            await asyncio.sleep(0)
        assert await asking == [False] * 8
        assert 0 < most < MAX_BULK_LINKS

    play(scene)
