"""Shards of two kinds of device in one answer, as real workers: torch (on the CPU here) and our own kernels.

What was delivered stays, the answer goes on by the other kind's arithmetic, and says so.
"""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from potluck.core.errors import OutOfDeviceMemory, PotluckError
from potluck.core.exactness import arithmetic_of
from potluck.core.sampling_params import SamplingParams
from potluck.net.loop import run
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, parse_stage, read_stored_model, serve
from potluck.orchestrator.frames import Finished, ShardFailover, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.testing.real_swarm import RealSwarm, layers_of
from potluck.weights.store import ModelStore
from tests.support.swarms import TINY, TINY_FLOATS, frames_of, head_node, stored_tiny, tokens_of

torch = pytest.importorskip("torch")
TORCH = "cuda:torch-cpu"
LEVELS = {"cpu": "bitwise", TORCH: "tolerance"}
PROMPT, COUNT, KILLED_AFTER = tuple(range(1, 40)), 48, 14


@dataclass
class Swarm:
    """A head and its two nodes: the first serves, the second is its spare."""

    head: Node
    model: RemoteModel
    first: Node
    spare: Node

    def request(self, prompt: tuple[int, ...] = PROMPT, count: int = COUNT) -> GenerationRequest:
        return msgspec.structs.replace(self.model.request(prompt, SamplingParams(), count), eos=())


def add_shard(
    node: Node, home: Path, model: str, device: str, layers: str | None = None, *, is_spare: bool = False,
    budget_bytes: int | None = None,
) -> None:  # fmt: skip
    stored_tiny(home, "Q4_0" if model == TINY else "F32")
    stored = read_stored_model(ModelStore(home / "models"), model)
    settings = ServingSettings(
        device=device, is_spare=is_spare, kv_budget_bytes=64 << 20, device_budget_bytes=budget_bytes
    )
    serve(node, stored, parse_stage(layers, 8), settings)


@asynccontextmanager
async def swarm_of(home: Path, model: str, device: str, spare_device: str) -> AsyncIterator[Swarm]:
    async with head_node([]) as first, head_node([]) as spare:
        add_shard(first, home, model, device)
        add_shard(spare, home, model, spare_device, is_spare=True)
        await asyncio.gather(*(node.shards[0].start() for node in (first, spare)))
        addresses = [await node.listen("127.0.0.1:0") for node in (first, spare)]
        async with head_node(addresses) as head:
            yield Swarm(head, await RemoteModel.find(head, model), first, spare)


async def disturbed(swarm: Swarm) -> list[StreamFrame]:
    frames: list[StreamFrame] = []
    async for frame in swarm.head.orchestrator.chat(swarm.request(), DistributedChatParams()):
        frames.append(frame)
        if isinstance(frame, TokenDelta) and len(tokens_so_far(frames)) == KILLED_AFTER:
            pid = swarm.first.shards[0].supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    return frames


def tokens_so_far(frames: list[StreamFrame]) -> list[int]:
    return [frame.token for frame in frames if isinstance(frame, TokenDelta)]


def exactness_of(frames: list[StreamFrame]) -> str:
    assert isinstance(frames[-1], Finished)
    return frames[-1].exactness


@pytest.mark.parametrize(("device", "spare"), [(TORCH, "cpu"), ("cpu", TORCH)])
def test_an_answer_that_changes_its_device_keeps_what_was_delivered_and_says_so(
    device: str, spare: str, models_home: Path
) -> None:
    """The model's floats are computed alike by both, so that the whole text is the same."""

    async def ask() -> tuple[list[StreamFrame], list[StreamFrame]]:
        async with swarm_of(models_home, TINY_FLOATS, device, spare) as swarm:
            whole = await frames_of(swarm.head, swarm.request(), DistributedChatParams())
            return whole, await disturbed(swarm)

    whole, frames = run(ask())
    assert exactness_of(whole) == LEVELS[device]
    assert tokens_of(frames) == tokens_of(whole)
    [failover] = [frame for frame in frames if isinstance(frame, ShardFailover)]
    assert failover.exactness == exactness_of(frames) == "mixed"
    assert failover.replayed_tokens >= len(PROMPT) + KILLED_AFTER - 1


def test_after_a_change_the_answer_is_what_the_new_device_makes_of_the_delivered_tokens(models_home: Path) -> None:
    """Quantised weights are multiplied differently: the two kinds part, and nothing of what was said is said anew."""

    async def ask() -> tuple[list[int], list[StreamFrame], list[int]]:
        async with swarm_of(models_home, TINY, TORCH, "cpu") as swarm:
            whole = tokens_of(await frames_of(swarm.head, swarm.request(), DistributedChatParams()))
            frames = await disturbed(swarm)
            kept = next(i for i, frame in enumerate(frames) if isinstance(frame, ShardFailover))
            said = tuple(tokens_so_far(frames[:kept]))
            request = swarm.request((*PROMPT, *said), COUNT - len(said))
            alone = DistributedChatParams(
                pipeline=(Placed(swarm.spare.id, "", parse_stage(None, 8), 0, arithmetic_of("cpu")),)
            )
            return whole, frames, tokens_of(await frames_of(swarm.head, request, alone))

    whole, frames, continued = run(ask())
    tokens = tokens_of(frames)
    said = len(tokens) - len(continued)
    assert KILLED_AFTER <= said < COUNT
    assert tokens[:said] == whole[:said]
    assert tokens[said:] == continued
    assert exactness_of(frames) == "mixed"


def test_a_shard_that_does_not_fit_is_refused_with_its_code_before_it_is_loaded(models_home: Path) -> None:
    async def start() -> None:
        async with head_node([]) as node:
            add_shard(node, models_home, TINY_FLOATS, TORCH, budget_bytes=1 << 20)
            with pytest.raises(OutOfDeviceMemory, match=r"MiB of weights, .* do not fit into the 1 MiB"):
                await asyncio.wait_for(node.shards[0].start(), 60)
            assert node.shards[0].info().vram_mb > 1000  # a reserve of a gigabyte is part of it

    run(start())


def test_running_out_of_memory_in_the_middle_of_an_answer_ends_the_worker_alone(models_home: Path) -> None:
    """The daemon stays, starts another worker, and the answer goes on where it was."""

    async def ask() -> tuple[list[StreamFrame], int, int]:
        async with head_node([]) as shard:
            add_shard(shard, models_home, TINY_FLOATS, TORCH)
            [server] = shard.shards
            await server.start()
            first = server.supervisor.pid
            assert first is not None
            async with head_node([await shard.listen("127.0.0.1:0")]) as head:
                model = await RemoteModel.find(head, TINY_FLOATS)
                taken = psutil.Process(first).memory_info().vms
                resource.prlimit(first, resource.RLIMIT_AS, (taken, taken))
                request = msgspec.structs.replace(model.request(list(range(1, 400)), SamplingParams(), 8), eos=())
                params = DistributedChatParams(settings=GenerationSettings(prefill_chunk=398, holder_wait_s=90.0))
                frames = await frames_of(head, request, params)
                return frames, first, server.supervisor.pid or 0

    frames, first, second = run(ask())
    assert len(tokens_of(frames)) == 8
    assert second not in (0, first)
    assert any(isinstance(frame, ShardFailover) for frame in frames)


def test_a_node_with_a_device_shares_a_swarm_with_one_without(models_home: Path, tmp_path: Path) -> None:
    """No address is named: the advert tells the device and its memory, the plan follows, and the answer says what it depended on."""
    stored_tiny(models_home, "F32")
    swarm = RealSwarm(tmp_path, models_home / "models", models_home / "cache", TINY_FLOATS)
    half = ("--listen", "127.0.0.1:0", "--max-layers", "4")
    try:
        first = swarm.up("first", *half)
        second = swarm.join("second", first.command("invite")["invite"], *half, "--device", TORCH, "--memory", "1GB")
        second.wait(lambda: first.can_answer() and second.can_answer(), 240)
        nodes = {node["id"]: node for node in second.state()["nodes"]}
        assert [nodes[each.node]["device"] for each in (first, second)] == ["cpu", TORCH]
        held = sorted(layers_of(second.state(), first.node) + layers_of(second.state(), second.node))
        assert held == [(0, 3), (4, 7)]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}
        usage = first.request("POST", "/v1/chat/completions", body)["usage"]
        assert usage["potluck"]["exactness"] == "mixed"
        assert sorted(usage["potluck"]["nodes"]) == sorted([first.node, second.node])
    finally:
        swarm.close()


def test_a_device_that_is_not_there_is_refused_before_anybody_counts_on_it(models_home: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    swarm = RealSwarm(tmp_path, models_home / "models", models_home / "cache", TINY_FLOATS)
    stored_tiny(models_home, "F32")
    try:
        with pytest.raises(PotluckError, match="no usable NVIDIA GPU"):
            swarm.up("first", "--listen", "127.0.0.1:0", "--device", "cuda")
    finally:
        swarm.close()
