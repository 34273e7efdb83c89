"""A node in this process with a real worker: layers that cannot be loaded, shards that load on demand and are evicted."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from potluck.core.errors import ShardUnavailable
from potluck.core.processors import own_cores
from potluck.core.sampling_params import SamplingParams
from potluck.engine.cpu_engine import Step
from potluck.net.loop import run
from potluck.net.spinning import Spinner
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, parse_stage, read_stored_model, serve
from potluck.orchestrator.frames import ShardStatus, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.shard.ahead import Ahead
from potluck.shard.in_process import TensorChunk
from potluck.shard.rehearsals import Rehearsals
from potluck.weights.store import ModelStore
from potluck.wire.messages import Stage
from potluck.worker.local_model import LocalModel
from tests.support.shard_cores import every_message
from tests.support.swarms import TINY, frames_of, head_node, stored_tiny, tokens_of


def served(node: Node, home: Path, layers: str | None = None, **changes: object) -> None:
    stored_tiny(home)
    stored = read_stored_model(ModelStore(home / "models"), TINY)
    serve(node, msgspec.structs.replace(stored, **changes), parse_stage(layers, 8), ServingSettings())


def test_layers_that_cannot_be_loaded_say_so_instead_of_waiting_for_ever(models_home: Path, tmp_path: Path) -> None:
    async def start() -> None:
        async with head_node([]) as node:
            served(node, models_home, path=tmp_path / "gone.gguf")
            with pytest.raises(ShardUnavailable, match="cannot be loaded: "):
                await asyncio.wait_for(node.shards[0].start(), 60)

    run(start())


def test_a_shard_loads_at_the_first_open_and_again_after_its_eviction(models_home: Path) -> None:
    async def ask() -> None:
        async with head_node([]) as shard:
            served(shard, models_home)
            address = await shard.listen("127.0.0.1:0")
            async with head_node([address]) as node:
                model = await RemoteModel.find(node, TINY)
                request = model.request(range(1, 20), SamplingParams(), 8)
                [server] = shard.shards
                assert server.supervisor.pid is None  # on offer, and nothing in memory
                first = tokens_of(await frames_of(node, request, DistributedChatParams()))
                await asyncio.sleep(0.05)
                assert server.supervisor.pid is not None
                worker = psutil.Process(server.supervisor.pid)
                await server.evict()
                assert server.supervisor.pid is None
                await asyncio.to_thread(worker.wait, 10)  # the process ends, and with it all its memory
                assert tokens_of(await frames_of(node, request, DistributedChatParams())) == first

    run(ask())


def test_an_evicted_shard_is_still_online_and_loaded_when_start_returns(models_home: Path, tmp_path: Path) -> None:
    async def start() -> None:
        async with head_node([]) as node:
            served(node, models_home)
            [server] = node.shards
            for _ in range(2):
                await asyncio.wait_for(server.start(), 60)
                assert server.info().is_loaded
                await server.evict()
                assert not server.info().is_loaded
                assert (await server.health()).online  # it loads again for the next session
        async with head_node([]) as node:
            served(node, models_home, path=tmp_path / "gone.gguf")
            for _ in range(2):
                with pytest.raises(ShardUnavailable):
                    await asyncio.wait_for(node.shards[0].start(), 60)
            assert not (await node.shards[0].health()).online

    run(start())


def test_a_shard_with_a_session_is_not_evicted(models_home: Path) -> None:
    async def ask() -> None:
        async with head_node([]) as shard:
            served(shard, models_home)
            address = await shard.listen("127.0.0.1:0")
            async with head_node([address]) as node:
                model = await RemoteModel.find(node, TINY)
                request = msgspec.structs.replace(model.request(range(1, 20), SamplingParams(), 200), eos=())
                count = 0
                async for _ in node.orchestrator.chat(request, DistributedChatParams()):
                    count += 1
                    if count == 5:
                        await shard.shards[0].evict()
                assert count == 201

    run(ask())


@pytest.mark.parametrize("uses_ring", [True, False])
def test_a_member_that_is_not_part_of_a_session_has_no_effect_on_it(uses_ring: bool, models_home: Path) -> None:
    """It knows the session's id, has links of its own to shard and head, and says everything there is to say, all the time."""

    async def ask() -> tuple[list[int], list[StreamFrame], int]:
        async with head_node([]) as shard, head_node([]) as node, head_node([]) as stranger:
            served(shard, models_home)
            address = await shard.listen("127.0.0.1:0")
            await node.orchestrator.connect([address])
            await stranger.links.connect(address)
            await stranger.links.connect(await node.listen("127.0.0.1:0"))
            model = await RemoteModel.find(node, TINY)
            request = model.request(range(1, 20), SamplingParams(), 40)
            params = DistributedChatParams(settings=GenerationSettings(uses_ring=uses_ring))
            alone = tokens_of(await frames_of(node, request, params))
            frames: list[StreamFrame] = []
            async for frame in node.orchestrator.chat(request, params):
                frames.append(frame)
                if isinstance(frame, TokenDelta):
                    [session] = node.orchestrator._running[0].generation.sessions
                    for message, body in every_message(session):
                        stranger.links.send(shard.id, None, message, body)
                        stranger.links.send(node.id, None, message, body)
            counted = sum(shard.shards[0].core.counters.values()) + sum(shard.counters.values())
            return alone, frames, counted

    alone, frames, counted = run(ask())
    assert tokens_of(frames) == alone
    assert [frame for frame in frames if isinstance(frame, ShardStatus)] == []
    assert counted > 10 * len(alone)


def test_those_who_stay_in_a_pipeline_suspect_the_one_that_was_lost(models_home: Path) -> None:
    """A member with an orchestrator of its own prefers the spare from then on, until it hears from the lost one again."""

    async def ask() -> None:
        async with head_node([]) as member, head_node([]) as lost, head_node([]) as spare, head_node([]) as node:
            served(member, models_home, "0-3")
            served(lost, models_home, "4-7")
            served(spare, models_home, "4-7")
            addresses = [await each.listen("127.0.0.1:0") for each in (member, lost, spare)]
            for each in (lost, spare):
                await each.shards[0].start()
            await node.orchestrator.connect(addresses)
            await member.orchestrator.connect(addresses[1:])
            model = await RemoteModel.find(node, TINY)
            request = model.request(range(1, 20), SamplingParams(), 64)  # more than there are credits for
            first = Placed(member.id, addresses[0], Stage(0, 4, True))
            last = Placed(lost.id, addresses[1], Stage(4, 8, False, True))
            params = DistributedChatParams(pipeline=(first, last))
            alone = tokens_of(await frames_of(node, request, params))
            store, loop = member.orchestrator.store, asyncio.get_running_loop()
            frames: list[StreamFrame] = []
            preferred = set()  # while it is suspected: what it says of itself clears that, every two seconds
            async for frame in node.orchestrator.chat(request, params):
                frames.append(frame)
                if isinstance(frame, TokenDelta) and frame.position == 24:
                    os.kill(lost.shards[0].supervisor.pid or 0, signal.SIGKILL)
                if store.is_suspect(lost.id, loop.time()):
                    preferred.add(member.orchestrator.pipeline_for(request, DistributedChatParams())[-1].node)
                assert not store.is_suspect(spare.id, loop.time())
            assert tokens_of(frames) == alone
            assert preferred == {spare.id}
            await member.orchestrator.connect(addresses[1:2])
            assert not store.is_suspect(lost.id, loop.time())

    run(ask())


async def chunks_of(*parts: TensorChunk) -> AsyncIterator[TensorChunk]:
    for part in parts:
        yield part


def test_activations_go_in_and_come_out_of_a_shard_in_the_same_process(models_home: Path) -> None:
    """Two shards one after the other, in uneven chunks, give the hidden states of the whole model to the last bit."""
    tokens = list(range(1, 21))

    async def ask() -> tuple[bytes, list[int], str]:
        async with head_node([]) as first, head_node([]) as second:
            served(first, models_home, "0-3")
            served(second, models_home, "4-7")
            [lower], [upper] = first.shards, second.shards
            parts = [
                TensorChunk(n, np.array(tokens[a : a + n], "<i4").tobytes()) for a, n in ((0, 7), (7, 12), (19, 1))
            ]
            rows = b"".join([out.data async for out in upper.forward(lower.forward(chunks_of(*parts), 20), 20)])
            await asyncio.sleep(0)
            with pytest.raises(ShardUnavailable, match="bad_request: 3 bytes for 1 positions"):
                async for _ in upper.forward(chunks_of(TensorChunk(1, b"abc")), 4):
                    pass
            with pytest.raises(ShardUnavailable, match="context_length_exceeded"):
                async for _ in upper.forward(chunks_of(), 10_000):
                    pass
            return rows, [each.core.session_count for each in (lower, upper)], repr(lower._callers)

    rows, left, callers = run(ask())
    entry, store = stored_tiny(models_home), ModelStore(models_home / "models")
    model = LocalModel(store.open(TINY), source=entry.weights_sha256, cache_folder=store.packed_folder(TINY), threads=1)
    [result] = model.engine.forward([Step(model.engine.open(20), 0, tokens=tokens)])
    model.close()
    assert rows == result.hidden.tobytes()
    assert (left, callers) == ([0, 0], "{}")


def test_rehearsals_and_looking_change_no_token(models_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with two cores have none of the former of themselves for steps that are so short, those with more none of the latter."""
    taken: list[int] = []
    take = Rehearsals.take

    def counting(self: Rehearsals, *arguments: object) -> None:
        taken.append(1)
        take(self, *arguments)  # type: ignore[arg-type]

    watched: set[Spinner] = set()
    stay_awake = Spinner.stay_awake

    def staying_awake(self: Spinner, seconds: float) -> None:
        watched.add(self)
        stay_awake(self, seconds)

    async def ask() -> list[int]:
        stored = read_stored_model(ModelStore(models_home / "models"), "smollm2-135m")
        async with head_node([]) as first, head_node([]) as second:
            for node, layers in ((first, "0-14"), (second, "15-29")):
                serve(node, stored, parse_stage(layers, 30), ServingSettings(threads=1))
            addresses = [await node.listen("127.0.0.1:0") for node in (first, second)]
            async with head_node(addresses) as head:
                model = await RemoteModel.find(head, "smollm2-135m")
                request = msgspec.structs.replace(model.request(range(1, 20), SamplingParams(seed=5), 40), eos=())
                return tokens_of(await frames_of(head, request, DistributedChatParams()))

    monkeypatch.setattr(Rehearsals, "take", counting)
    monkeypatch.setattr(Spinner, "stay_awake", staying_awake)
    monkeypatch.setattr("potluck.node.serving.rehearsal_shortest_s", lambda: 0.0)
    monkeypatch.setattr("potluck.node.serving.rehearsal_watch_s", lambda device, threads: 0.0)
    monkeypatch.setattr("potluck.node.serving.rehearsal_lead_s", lambda device: 0.0)
    monkeypatch.setattr("potluck.node.serving.look_s", lambda device, threads: 0.0)
    without = run(ask())
    assert not taken
    assert not watched
    monkeypatch.setattr("potluck.node.serving.rehearsal_lead_s", lambda device: 0.0012)
    for reaches_worker in (False, True):
        monkeypatch.setattr("potluck.node.serving.rehearsal_reaches_worker", lambda reaches=reaches_worker: reaches)
        taken.clear()
        assert run(ask()) == without
        assert taken
        assert not watched
    monkeypatch.setattr("potluck.node.serving.rehearsal_watch_s", lambda device, threads: 0.003)
    assert run(ask()) == without
    assert len(watched) == 2
    watched.clear()
    monkeypatch.setattr("potluck.node.serving.rehearsal_lead_s", lambda device: 0.0)
    monkeypatch.setattr("potluck.node.serving.look_s", lambda device, threads: 0.1)  # however slow the machine is
    assert run(ask()) == without
    assert len(watched) == (2 if 1 < own_cores() < 4 else 0), "where there is a core for each"


@pytest.mark.parametrize("uses_ring", [True, False])
def test_what_is_foreseen_leaves_early_and_changes_no_token(
    uses_ring: bool, models_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> tuple[list[int], list[int]]:
        async with head_node([]) as first, head_node([]) as second:
            served(first, models_home, "0-3")
            served(second, models_home, "4-7")
            addresses = [await node.listen("127.0.0.1:0") for node in (first, second)]
            async with head_node(addresses) as head:
                model = await RemoteModel.find(head, TINY)
                request = msgspec.structs.replace(model.request(range(1, 20), SamplingParams(seed=5), 40), eos=())
                params = DistributedChatParams(settings=GenerationSettings(uses_ring=uses_ring))
                tokens = tokens_of(await frames_of(head, request, params))
                shards = [shard for node in (first, second) for shard in node.shards]
                assert not any(shard.core.counters["wrong_foresight"] for shard in shards)
                return tokens, [shard._ahead.count for shard in shards]

    tokens, early = run(ask())
    # Of 39 tokens after the first: both shards' batches and both ways, or all but the last way, which ends at the head.
    assert min(early) > 20
    assert sum(early) > (100 if uses_ring else 60)
    monkeypatch.setattr(Ahead, "look", lambda ahead: None)
    assert run(ask()) == (tokens, [0, 0])
