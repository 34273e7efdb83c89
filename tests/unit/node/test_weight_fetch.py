"""Weights from peers over the in-memory network: several sources, liars among them, partial ones, none at all, a broken disk."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck.core.errors import BadRequest, DownloadFailed, WeightsMissing, WeightsUnavailable
from potluck.identity.keys import NodeKey
from potluck.net.memory import MemoryNetwork
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, read_stored_model, serve
from potluck.node.weight_fetch import FetchReport, WeightFetch, WeightSource
from potluck.node.weight_server import OfferedWeights
from potluck.weights.open_model import open_checkpoint
from potluck.weights.peer_fetch import FetchSettings
from potluck.weights.store import ModelStore
from potluck.wire.messages import BulkLink, Describe, GetChunk, GetHoldings, Stage
from tests.support.partial_models import WholeModel, whole_tiny

ALL = Stage(0, 2, True, True)
FIRST = Stage(0, 1, True, False)


class FirstWeights(OfferedWeights, frozen=True):
    """Of the source that is to be asked before the others."""

    gate: threading.Event

    def read_chunk(self, tensor: str, chunk: int) -> bytes:
        self.gate.set()
        return super().read_chunk(tensor, chunk)


class LaterWeights(OfferedWeights, frozen=True):
    """Says what it has once the first source was asked for something."""

    gate: threading.Event

    def held_ranges(self) -> tuple[tuple[int, int], ...]:
        assert self.gate.wait(30)
        return super().held_ranges()


class LyingWeights(FirstWeights, frozen=True):
    """Every byte of every chunk is wrong."""

    def read_chunk(self, tensor: str, chunk: int) -> bytes:
        return bytes(byte ^ 0xFF for byte in super().read_chunk(tensor, chunk))


class Bench:
    """Nodes on one network, and a store that is empty at first."""

    def __init__(self, whole: WholeModel, root: Path) -> None:
        self.whole, self.store = whole, ModelStore(root)
        self.network = MemoryNetwork()
        self.gate = threading.Event()
        self.nodes: list[Node] = []
        self.sources: list[WeightSource] = []
        self.fetcher = self._node()

    def _node(self) -> Node:
        key = NodeKey.generate()
        node = Node(key, self.network.transport(key.node_id))
        self.nodes.append(node)
        return node

    def offered(self) -> OfferedWeights:
        return read_stored_model(self.whole.store, "tiny").offered()

    def gated(self, kind: type[FirstWeights | LaterWeights]) -> OfferedWeights:
        return kind(*msgspec.structs.astuple(self.offered()), self.gate)

    async def source(self, offered: OfferedWeights | None) -> Node:
        node = self._node()
        if offered is not None:
            node.weights.offer(offered)
        self.sources.append(WeightSource(node.id, await node.listen("memory:0")))
        return node

    async def liar(self) -> Node:
        return await self.source(self.gated(LyingWeights))

    def fetch(self, stage: Stage = ALL, **options: Any) -> Coroutine[Any, Any, FetchReport]:
        return WeightFetch(
            self.fetcher.transport,
            self.store,
            model_id="tiny",
            weights_sha256=self.whole.entry.weights_sha256,
            stage=stage,
            sources=self.sources,
            **options,
        ).run()

    def check_bytes(self, stage: Stage = ALL) -> None:
        checkpoint = open_checkpoint(self.store.path("tiny"))
        read_stored_model(self.store, "tiny").require(stage)
        for name in checkpoint.tensors:
            if stage == ALL or name == "embedding" or name.startswith("layers.0."):
                assert bytes(checkpoint.read(name)) == bytes(self.whole.checkpoint.read(name))
        checkpoint.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - counters have no events, and only turns of the loop are waited for
        await asyncio.sleep(0)


async def hold_back(bench: Bench, source: Node, seconds: float) -> None:
    """The answer to what a source is asked next takes so long."""
    loop = asyncio.get_running_loop()
    now_s = loop.time
    await until(lambda: bool(source.weights._tasks))
    bench.network.freeze(source.id)  # what it sends is on its way
    loop.time = lambda: now_s() + seconds  # type: ignore[method-assign]
    for _ in range(20):
        await asyncio.sleep(0)
    bench.network.thaw(source.id)


def play_scene(scene: Callable[[Bench], Coroutine[Any, Any, None]], root: Path) -> None:
    """Runs a scene; afterwards no task and no link of it is left."""

    async def main() -> None:
        bench = Bench(whole_tiny(root / "whole"), root / "models")
        try:
            await scene(bench)
        finally:
            for node in bench.nodes:
                await node.stop()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]:
    return lambda scene: play_scene(scene, tmp_path)


Play = Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]


def test_a_file_that_was_cut_short_is_missing_and_fetched_again(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.source(bench.offered())
        await bench.fetch(ALL)
        file = bench.store.path("tiny") / "units" / "layer-0001.weights"
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(WeightsMissing, match="layer 1"):
            read_stored_model(bench.store, "tiny").require(ALL)
        assert (await bench.fetch(ALL)).size_bytes > 0
        bench.check_bytes()

    play(scene)


def test_an_empty_store_gets_a_stage_from_several_peers(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        for _ in range(3):
            await bench.source(bench.offered())
        report = await bench.fetch(FIRST)
        bench.check_bytes(FIRST)
        assert bench.store.find("tiny").held == "0-0"
        assert sum(source.size_bytes for source in report.sources) == report.size_bytes > 0
        with pytest.raises(WeightsMissing, match="layer 1, the output"):
            serve(bench.fetcher, read_stored_model(bench.store, "tiny"), ALL, ServingSettings())
        again = await bench.fetch(FIRST)
        assert (again.size_bytes, again.sources) == (0, ())
        await bench.fetch(ALL)
        bench.check_bytes()

    play(scene)


def test_a_liar_among_five_is_found_out_and_nothing_of_it_is_kept(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        liar = await bench.liar()
        for _ in range(4):
            await bench.source(bench.gated(LaterWeights))
        report = await bench.fetch()
        bench.check_bytes()
        [told] = [source for source in report.sources if source.source == liar.id]
        assert (told.chunks, told.gone) == (0, "wrong_bytes")
        assert told.faults["wrong_bytes"] >= 2
        assert all(not source.faults for source in report.sources if source.source != liar.id)

    play(scene)


def test_only_liars_means_a_typed_failure_that_names_them_and_what_is_missing(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        liar = await bench.liar()
        with pytest.raises(WeightsUnavailable) as caught:
            await bench.fetch(FIRST)
        assert "layer 0, the embedding of tiny cannot be had" in str(caught.value)
        assert liar.id.hex()[:8] in str(caught.value)
        assert "wrong_bytes" in str(caught.value)
        assert bench.store.find("tiny").held == "nothing"

    play(scene)


def test_without_peers_the_outside_is_asked_and_with_them_it_is_not(play: Play) -> None:
    asked: list[str] = []

    async def scene(bench: Bench) -> None:
        def outside(tensor: str, chunk: int) -> bytes:
            asked.append(tensor)
            return bench.whole.chunk(tensor, chunk)

        await bench.source(bench.offered())
        await bench.fetch(FIRST, outside=outside)
        assert asked == []
        bench.nodes[1].weights.withdraw(bench.whole.entry.weights_sha256)
        await bench.fetch(ALL, outside=outside)
        assert asked
        bench.check_bytes()

    play(scene)


def test_a_node_that_has_some_layers_hands_them_on(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        partial = bench.whole.empty_copy(bench.store.root.parent / "second")
        bench.whole.fill(partial, ("embedding", "layer-0000"))
        second = ModelStore(bench.store.root.parent / "second")
        await bench.source(read_stored_model(second, "tiny").offered())
        with pytest.raises(WeightsUnavailable, match="layer 1, the output"):
            await bench.fetch()
        bench.check_bytes(FIRST)
        bench.whole.fill(partial, ("layer-0001", "output"))  # the source gets more, and offers it without being told
        report = await bench.fetch()
        bench.check_bytes()
        assert report.size_bytes < sum(record.size_bytes for record in bench.whole.manifest.tensors)

    play(scene)


class SilentWeights(FirstWeights, frozen=True):
    """Says what it has, and then takes longer than anybody waits."""

    def read_chunk(self, tensor: str, chunk: int) -> bytes:
        self.gate.set()
        time.sleep(0.2)
        return b""


def test_a_source_that_falls_silent_is_replaced(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        silent = await bench.source(bench.gated(SilentWeights))
        await bench.source(bench.gated(LaterWeights))
        report = await bench.fetch(settings=FetchSettings(silence_s=0.3, steal_after_s=10.0))
        bench.check_bytes()
        assert {source.source: bool(source.faults) for source in report.sources}[silent.id]

    play(scene)


def test_a_source_that_dies_in_the_middle_is_replaced(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        doomed = await bench.source(bench.gated(FirstWeights))
        await bench.source(bench.gated(LaterWeights))
        fetching = asyncio.ensure_future(bench.fetch())
        await until(lambda: doomed.weights.counters["chunks_served"] >= 2)
        bench.network.kill(doomed.id)
        await fetching
        bench.check_bytes()

    play(scene)


def test_a_full_disk_ends_the_fetch_with_words_and_what_was_there_is_used_later(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.source(bench.offered())
        partial = bench.whole.empty_copy(bench.store.root)
        (partial.folder / "units").mkdir()
        blocked = partial.folder / "units" / "layer-0000.part"
        blocked.mkdir()  # stands for whatever the disk refuses
        with pytest.raises(DownloadFailed, match=r"layer-0000.part"):
            await bench.fetch(FIRST)
        blocked.rmdir()
        await bench.fetch(FIRST)
        bench.check_bytes(FIRST)

    play(scene)


def test_two_fetches_of_one_model_do_not_meet(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.source(bench.offered())
        bench.whole.empty_copy(bench.store.root)
        with bench.store.working_on("tiny"), pytest.raises(BadRequest, match="another potluck process"):
            await bench.fetch(FIRST)
        await bench.fetch(FIRST)

    play(scene)


def test_weights_travel_on_links_of_their_own_and_others_are_answered_meanwhile(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        source = await bench.source(bench.offered())
        await bench.fetcher.links.connect(bench.sources[0].address, source.id)
        source.weights._reading = asyncio.Semaphore(0)  # the transfer is under way for as long as the test wants
        fetching = asyncio.ensure_future(bench.fetch(FIRST))
        await until(lambda: bool(source.links._bulk_links))
        answer, _ = await bench.fetcher.orchestrator.ask(source.id, Describe)
        assert answer.node == source.id  # type: ignore[union-attr]
        [ordinary], [bulk] = source.links._links[bench.fetcher.id], source.links._bulk_links[bench.fetcher.id]
        assert ordinary is not bulk
        for _ in range(4):
            source.weights._reading.release()
        await fetching
        await until(lambda: not source.links._bulk_links)  # gone with the fetch
        assert source.links._links[bench.fetcher.id] == [ordinary]

    play(scene)


def test_requests_for_weights_are_ignored_on_other_links_and_bulk_links_take_nothing_else(play: Play) -> None:
    class Silent:
        messages: list[object] = []  # noqa: RUF012

        def on_message(self, link: object, message: object, body: bytes) -> None:
            self.messages.append(message)

        def on_lost(self, link: object, reason: str) -> None:
            self.messages.append(reason)

    async def scene(bench: Bench) -> None:
        source = await bench.source(bench.offered())
        address = bench.sources[0].address
        ordinary = await bench.fetcher.transport.dial(address, source.id, Silent(), 1.0)
        weights = bench.whole.entry.weights_sha256
        for message in (GetHoldings(1, weights), GetChunk(2, weights, "embedding", 0)):
            ordinary.send(message)
        bulk = await bench.fetcher.transport.dial(address, source.id, Silent(), 1.0)
        bulk.send(BulkLink())
        bulk.send(Describe(3))
        await until(lambda: source.counters["for_bulk_links_only"] == 2)
        await until(lambda: source.weights.counters["not_for_bulk_links"] == 1)
        for link in (ordinary, bulk):
            link.abort()

    play(scene)


def test_a_peer_has_a_few_bulk_links_and_no_more(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        source = await bench.source(bench.offered())
        lost: list[str] = []

        class Counting:
            def on_message(self, link: object, message: object, body: bytes) -> None: ...

            def on_lost(self, link: object, reason: str) -> None:
                lost.append(reason)

        links = [
            await bench.fetcher.transport.dial(bench.sources[0].address, source.id, Counting(), 1.0) for _ in range(6)
        ]
        for link in links:
            link.send(BulkLink())
        await until(lambda: len(lost) >= 2)
        assert len(source.links._bulk_links[bench.fetcher.id]) == 4

    play(scene)


def test_a_cancelled_fetch_leaves_nothing_running_and_goes_on_later(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        source = await bench.source(bench.offered())
        fetching = asyncio.ensure_future(bench.fetch())
        await until(lambda: source.weights.counters["chunks_served"] >= 3)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        assert fetching.cancelled()
        await bench.fetch()
        bench.check_bytes()

    play(scene)


def test_a_peer_whose_first_address_leads_nowhere_is_found_at_another(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.source(bench.offered())
        [source] = bench.sources
        bench.sources = [WeightSource(source.node, "memory:nowhere", ("memory:neither", source.address))]
        await bench.fetch(FIRST)
        bench.check_bytes(FIRST)

    play(scene)


def test_a_manifest_that_takes_its_time_is_waited_for(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        source = await bench.source(bench.offered())
        fetching = asyncio.ensure_future(bench.fetch(FIRST))
        await hold_back(bench, source, 50.0)
        await fetching
        bench.check_bytes(FIRST)

    play(scene)
