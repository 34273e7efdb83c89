"""The seeds' own tests by name, on real processes over TLS: HearthNet §8.2 and §8.3, and what pmetal tests of its sampler."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from potluck.bench.random_model import RandomShape, random_model
from potluck.core.errors import PotluckError, WeightsMismatch
from potluck.core.sampling_params import SamplingParams
from potluck.engine.cpu_engine import Step as EngineStep
from potluck.engine.sampling import choose
from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.loop import run
from potluck.net.tls import TlsTransport
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, StoredModel, parse_stage, read_stored_model, serve
from potluck.orchestrator.frames import PipelineAborted, ShardFailover, ShardStatus, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.testing.local_swarm import LocalNode, LocalSwarm, NodePlan
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore
from potluck.wire.effects import SendTo
from potluck.wire.messages import Describe, Described, ShardInfo, Stage, Step
from potluck.worker.local_model import LocalModel
from tests.support.lying_shard import LyingShard
from tests.support.swarms import TINY, frames_of, head_node, stored_tiny, tokens_of

LAYERS = 8
PROMPT = tuple(1 + 37 * number % 400 for number in range(40))
COUNT = 24
GREEDY = SamplingParams()
LOWER, UPPER, SPARE = 0, 1, 2
FIRST, SECOND = Stage(0, 4, True), Stage(4, LAYERS, False, True)
ROW = 4 * 64


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    """Three nodes: two halves of the tiny model, and one that holds all of it and is used when another fails."""
    stored_tiny(models_home)
    with LocalSwarm(TINY, [NodePlan("0-3"), NodePlan("4-7"), NodePlan(None, is_spare=True)], models_home) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def stored(models_home: Path) -> StoredModel:
    stored_tiny(models_home)
    return read_stored_model(ModelStore(models_home / "models"), TINY)


@pytest.fixture(scope="module")
def unsplit(models_home: Path) -> list[int]:
    entry, store = stored_tiny(models_home), ModelStore(models_home / "models")
    model = LocalModel(store.open(TINY), source=entry.weights_sha256, cache_folder=store.packed_folder(TINY), threads=1)
    tokens = [p.chosen.token for p in model.generate(PROMPT, GREEDY, COUNT) if p.chosen is not None]
    model.close()
    return tokens


def place_of(node: LocalNode, stage: Stage) -> Placed:
    shown = node.announcement
    assert shown is not None
    return Placed(bytes.fromhex(shown.node), shown.address, stage)


def statuses(frames: list[StreamFrame]) -> list[ShardStatus]:
    return [frame for frame in frames if isinstance(frame, ShardStatus)]


# ---------------------------------------------------------------- §8.2 on one machine


async def decode_speed(
    node: Node, request: GenerationRequest, params: DistributedChatParams
) -> tuple[list[int], float]:
    """The tokens, and how many came in a second after the first."""
    times, tokens = [], []
    async for frame in node.orchestrator.chat(request, params):
        if isinstance(frame, TokenDelta):
            tokens.append(frame.token)
            times.append(time.perf_counter())
    return tokens, (len(times) - 1) / (times[-1] - times[0])


def test_two_node_split_happy_path_with_its_ratio_to_local(models_home: Path) -> None:
    """A real model, split in two on two nodes, one thread each; the unsplit one on one thread beside it."""
    store = ModelStore(models_home / "models")
    entry = store.find(DEFAULT_MODEL_ID)
    params, count = SamplingParams(), 32
    local = LocalModel(
        store.open(entry.id), source=entry.weights_sha256, cache_folder=store.packed_folder(entry.id), threads=1
    )
    prompt = local.encode_chat([{"role": "user", "content": "What is a potluck dinner?"}])
    expected = [p.chosen.token for p in local.generate(prompt, params, count) if p.chosen is not None]
    assert local.timing is not None
    alone = local.timing.tokens_per_s
    local.close()

    async def ask(addresses: list[str]) -> tuple[list[int], float]:
        async with head_node(addresses) as node:
            model = await RemoteModel.find(node, entry.id)
            assert model.encode_chat([{"role": "user", "content": "What is a potluck dinner?"}]) == prompt
            return await decode_speed(node, model.request(prompt, params, count), DistributedChatParams())

    with LocalSwarm(entry.id, [NodePlan("0-14"), NodePlan("15-29")], models_home) as nodes:
        tokens, split = run(ask(nodes.addresses))
    print(f"\nlocal {alone:.0f} tokens/s, two nodes {split:.0f} tokens/s, ratio {split / alone:.2f}")
    assert tokens == expected


def test_shard_host_killed_mid_stream_fails_over_to_a_third_node(models_home: Path, unsplit: list[int]) -> None:
    plans = [NodePlan("0-3"), NodePlan("4-7"), NodePlan(None, is_spare=True)]

    async def ask(nodes: LocalSwarm) -> list[StreamFrame]:
        frames: list[StreamFrame] = []
        async with head_node(nodes.addresses) as node:
            model = await RemoteModel.find(node, TINY)
            async for frame in node.orchestrator.chat(model.request(PROMPT, GREEDY, COUNT), DistributedChatParams()):
                frames.append(frame)
                if isinstance(frame, TokenDelta) and frame.position == len(PROMPT) + 8:
                    nodes.nodes[UPPER].signal(signal.SIGKILL)
        return frames

    with LocalSwarm(TINY, plans, models_home) as nodes:
        frames = run(ask(nodes))
        third = place_of(nodes.nodes[SPARE], SECOND)
    assert tokens_of(frames) == unsplit
    [failover] = [frame for frame in frames if isinstance(frame, ShardFailover)]
    print(f"\nlatency penalty {failover.pause_ms:.0f} ms")
    assert failover.pause_ms < 10_000  # bounded, on however busy a machine
    assert failover.replaced_by[-1] == f"{third.node.hex()[:8]}:4-7"
    [status] = statuses(frames)
    assert (status.status, status.code) == ("degraded", "shard_unavailable")


def test_the_last_holder_killed_mid_stream_falls_back_to_the_heads_own_copy(
    models_home: Path, unsplit: list[int]
) -> None:
    """§5.4: the answer goes on where it was, with the same tokens, and `fallback_to_local_total` counts it."""

    async def ask(nodes: LocalSwarm) -> tuple[list[StreamFrame], str, str]:
        frames: list[StreamFrame] = []
        async with head_node(nodes.addresses) as node:
            model = await RemoteModel.find(node, TINY)
            assert model.offer_own_copy(ModelStore(models_home / "models"), ServingSettings())
            assert node.shards[0].supervisor.pid is None  # not loaded as long as others are there
            async for frame in node.orchestrator.chat(model.request(PROMPT, GREEDY, COUNT), DistributedChatParams()):
                frames.append(frame)
                if isinstance(frame, TokenDelta) and frame.position == len(PROMPT) + 8:
                    nodes.nodes[UPPER].signal(signal.SIGKILL)
            return frames, node.metrics_page().decode(), node.id.hex()

    with LocalSwarm(TINY, [NodePlan("0-3"), NodePlan("4-7")], models_home) as nodes:
        frames, page, head = run(ask(nodes))
    assert tokens_of(frames) == unsplit
    [failover] = [frame for frame in frames if isinstance(frame, ShardFailover)]
    assert failover.replaced_by[-1] == f"{head[:8]}:4-7"
    assert "distributed_inference_fallback_to_local_total 1.0" in page


def test_two_pipelines_on_three_nodes_at_once_do_not_deadlock(swarm: LocalSwarm, unsplit: list[int]) -> None:
    """One over 0-3 and 4-7, the other over the third node and the same 4-7; each text is right, and the ratio is printed."""
    one = (place_of(swarm.nodes[LOWER], FIRST), place_of(swarm.nodes[UPPER], SECOND))
    two = (place_of(swarm.nodes[SPARE], FIRST), place_of(swarm.nodes[UPPER], SECOND))

    async def ask() -> tuple[float, float]:
        async with head_node(swarm.addresses) as node:
            model = await RemoteModel.find(node, TINY)
            request = model.request(PROMPT, GREEDY, COUNT)

            async def timed(pipeline: tuple[Placed, ...]) -> float:
                began = time.perf_counter()
                frames = await frames_of(node, request, DistributedChatParams(pipeline=pipeline))
                assert tokens_of(frames) == unsplit
                assert statuses(frames) == []
                return time.perf_counter() - began

            await timed(one)
            await timed(two)  # links stand, everything is warm
            alone = max([await timed(one), await timed(two)])
            together = max(await asyncio.gather(*(timed(p) for p in (one, two) * 2)))
            return alone, together

    alone, together = run(ask())
    print(f"\nalone {alone * 1000:.0f} ms, four at once {together * 1000:.0f} ms each, ratio {together / alone:.2f}")


# ---------------------------------------------------------------- §8.3 malicious shards


def offered(stored: StoredModel, stage: Stage, **changes: object) -> ShardInfo:
    info = ShardInfo(stored.id, stored.weights_sha256, 1, LAYERS, stage, True, 16, 0, 0, 100)
    return msgspec.structs.replace(info, **changes)


def rubbish(value: float) -> bytes:
    return np.full(ROW // 4, value, np.float32).tobytes()


async def ask_through_a_liar(
    liar: LyingShard, stage: Stage, honest: list[LocalNode], settings: GenerationSettings
) -> tuple[list[StreamFrame], bytes]:
    """The liar's stage first in line; the frames, and the head's metrics page."""
    async with liar.listening(), head_node([liar.address, *(node.address for node in honest)]) as node:
        model = await RemoteModel.find(node, TINY)
        request = model.request(PROMPT, GREEDY, COUNT)
        theirs = Placed(liar.id, liar.address, stage)
        other = place_of(honest[0], SECOND if stage == FIRST else FIRST)
        pipeline = (theirs, other) if stage == FIRST else (other, theirs)
        frames = await frames_of(node, request, DistributedChatParams(settings=settings, pipeline=pipeline))
        return frames, node.metrics_page()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 1e7])
def test_garbage_activations_are_detected_counted_and_failed_over(
    value: float, swarm: LocalSwarm, stored: StoredModel, unsplit: list[int]
) -> None:
    liar = LyingShard(offered(stored, FIRST), rubbish(value))
    honest = [swarm.nodes[UPPER], swarm.nodes[LOWER], swarm.nodes[SPARE]]
    frames, page = run(ask_through_a_liar(liar, FIRST, honest, GenerationSettings()))
    assert liar.told >= 1
    assert tokens_of(frames) == unsplit
    [status] = statuses(frames)
    assert (status.node, status.code) == (liar.id.hex(), "shard_corruption")
    counted = [line for line in page.decode().splitlines() if "shard_corruption_detected_total{" in line]
    assert [line.rsplit(" ", 1)[1] for line in counted] == ["1.0"]
    assert liar.id.hex()[:16] in counted[0]


def test_garbage_activations_without_a_spare_abort_the_pipeline(swarm: LocalSwarm, stored: StoredModel) -> None:
    liar = LyingShard(offered(stored, FIRST), rubbish(float("nan")))
    settings = GenerationSettings(holder_wait_s=1.5)
    frames, _ = run(ask_through_a_liar(liar, FIRST, [swarm.nodes[UPPER]], settings))
    assert isinstance(frames[-1], PipelineAborted)
    assert frames[-1].code == "shard_unavailable"
    assert [status.code for status in statuses(frames)] == ["shard_corruption"]
    assert liar.chances == 1  # it was not given another, though nobody else was there


def test_a_token_that_the_model_does_not_have_is_garbage_too(
    swarm: LocalSwarm, stored: StoredModel, unsplit: list[int]
) -> None:
    liar = LyingShard(offered(stored, SECOND), token=1 << 20)
    honest = [swarm.nodes[LOWER], swarm.nodes[UPPER], swarm.nodes[SPARE]]
    frames, _ = run(ask_through_a_liar(liar, SECOND, honest, GenerationSettings()))
    assert tokens_of(frames) == unsplit
    assert [status.code for status in statuses(frames)] == ["shard_corruption"]


@pytest.mark.parametrize("row", [b"", b"\0" * (ROW - 4), b"\0" * (ROW + 4)])
def test_activations_of_the_wrong_size_name_their_sender(
    row: bytes, swarm: LocalSwarm, stored: StoredModel, unsplit: list[int]
) -> None:
    liar = LyingShard(offered(stored, FIRST), row)
    honest = [swarm.nodes[UPPER], swarm.nodes[LOWER], swarm.nodes[SPARE]]
    frames, _ = run(ask_through_a_liar(liar, FIRST, honest, GenerationSettings()))
    assert tokens_of(frames) == unsplit
    assert [status.node for status in statuses(frames)] == [liar.id.hex()]


class SlowNode(Node):
    """Sound in everything, but from the tenth step on it sends one step a second."""

    def __init__(self, key: NodeKey) -> None:
        super().__init__(key, TlsTransport(key, admit_anyone))
        self._steps = 0
        self._send_at_once = self.links.send_all
        self.links.send_all = self._send_late  # type: ignore[method-assign]
        self.links.send_foreseen = lambda *_: False  # type: ignore[method-assign]  # so that all goes that way

    def _send_late(self, effects: Sequence[SendTo]) -> None:
        self._steps += sum(isinstance(effect.message, Step) for effect in effects)
        if self._steps > 10 and any(isinstance(effect.message, Step) for effect in effects):
            asyncio.get_running_loop().call_later(1.0, self._send_at_once, effects)
        else:
            self._send_at_once(effects)


@asynccontextmanager
async def slow_shard(stored: StoredModel) -> AsyncIterator[tuple[SlowNode, str]]:
    node = SlowNode(NodeKey.generate())
    try:
        await serve(node, stored, parse_stage("0-3", LAYERS), ServingSettings()).start()
        yield node, await node.listen("127.0.0.1:0")
    finally:
        await node.stop()


def test_slowloris_shard_is_a_stall_after_the_timeout_and_failed_over(
    swarm: LocalSwarm, stored: StoredModel, unsplit: list[int]
) -> None:
    async def ask() -> tuple[list[StreamFrame], bytes]:
        async with slow_shard(stored) as (slow, address), head_node([address, *swarm.addresses]) as node:
            model = await RemoteModel.find(node, TINY)
            pipeline = (Placed(slow.id, address, FIRST), place_of(swarm.nodes[UPPER], SECOND))
            params = DistributedChatParams(
                settings=GenerationSettings(stall_timeout_s=0.6, prefill_chunk=16), pipeline=pipeline
            )
            return await frames_of(node, model.request(PROMPT, GREEDY, COUNT), params), slow.id

    frames, slow = run(ask())
    assert tokens_of(frames) == unsplit
    [status] = statuses(frames)
    assert (status.node, status.code) == (slow.hex(), "pipeline_stalled")


# ---------------------------------------------------------------- weights and tokenizers


@pytest.fixture(scope="module")
def other_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with other weights under the same name."""
    home = tmp_path_factory.mktemp("other")
    shape = RandomShape(
        name="tiny8", hidden_size=64, layer_count=LAYERS, head_count=4, kv_head_count=2, head_size=16,
        feed_forward_size=96, vocabulary_size=512, context_length=512,
    )  # fmt: skip
    path = random_model(home / "made", shape, "Q4_0", lambda _: None)
    Puller(ModelStore(home / "models")).pull(str(path), TINY)
    return home


def test_weights_mismatch_is_refused(
    swarm: LocalSwarm, stored: StoredModel, other_home: Path, unsplit: list[int]
) -> None:
    """Both at the head, which sees two kinds of weights under one name, and at the shard, which compares the hash in OPEN."""
    other = read_stored_model(ModelStore(other_home / "models"), TINY)
    assert other.weights_sha256 != stored.weights_sha256

    async def ask() -> tuple[list[StreamFrame], list[StreamFrame]]:
        key = NodeKey.generate()
        wrong = Node(key, TlsTransport(key, admit_anyone))
        serve(wrong, other, parse_stage("4-7", LAYERS), ServingSettings())
        try:
            address = await wrong.listen("127.0.0.1:0")
            async with head_node([*swarm.addresses, address]) as node:
                with pytest.raises(WeightsMismatch, match="different weights"):
                    await RemoteModel.find(node, TINY)
                node.orchestrator.store.remove(wrong.id)
                model = await RemoteModel.find(node, TINY)
                request = model.request(PROMPT, GREEDY, COUNT)
                pipeline = (place_of(swarm.nodes[LOWER], FIRST), Placed(wrong.id, address, SECOND))
                replaced = await frames_of(node, request, DistributedChatParams(pipeline=pipeline))
                for each in (UPPER, SPARE):
                    node.orchestrator.store.remove(place_of(swarm.nodes[each], FIRST).node)
                params = DistributedChatParams(pipeline=pipeline, settings=GenerationSettings(holder_wait_s=1.0))
                return replaced, await frames_of(node, request, params)
        finally:
            await wrong.stop()

    replaced, ended = run(ask())
    assert tokens_of(replaced) == unsplit
    assert "refused: this shard holds other weights" in statuses(replaced)[0].reason
    assert isinstance(ended[-1], PipelineAborted)
    assert ended[-1].code == "weights_mismatch"


def altered(stored: StoredModel, other: StoredModel) -> dict[str, tuple[bytes, bytes]]:
    renamed = (
        stored.tokenizer.replace(b'"<|', b'"<!', 1) if b'"<|' in stored.tokenizer else stored.tokenizer[:-2] + b" }"
    )
    return {
        "another model's": (other.manifest, other.tokenizer),
        "another tokenizer": (stored.manifest, renamed if renamed != stored.tokenizer else b"{}"),
        "no tokenizer": (stored.manifest, b"\xff\x00rubbish"),
        "no manifest": (b"\xff\x00rubbish", stored.tokenizer),
        "nothing": (b"", b""),
    }


@pytest.mark.parametrize(
    "lie", ["another model's", "another tokenizer", "no tokenizer", "no manifest", "nothing", None]
)
def test_a_head_without_weights_checks_tokenizer_and_template_against_the_manifest(
    lie: str | None, swarm: LocalSwarm, stored: StoredModel, other_home: Path
) -> None:
    other = read_stored_model(ModelStore(other_home / "models"), TINY)
    text_side = altered(stored, other)[lie] if lie is not None else None
    liar = LyingShard(offered(stored, Stage(0, LAYERS, True, True)), text_side=text_side)

    async def ask() -> RemoteModel:
        async with liar.listening():
            async with head_node([liar.address]) as node:
                with pytest.raises(PotluckError):  # typed, and never what the parser stumbled over
                    await RemoteModel.find(node, TINY)
            async with head_node([liar.address, swarm.nodes[LOWER].address]) as node:
                return await RemoteModel.find(node, TINY)  # an honest holder is asked after a lying one

    model = run(ask())
    assert model.facts == stored.facts


# ---------------------------------------------------------------- cancellation


async def wait_until_free(node: Node, swarm: LocalSwarm, within_s: float) -> float:
    """Until no shard has a session; how long that took."""
    began = time.perf_counter()
    while True:
        answers = [
            (await node.orchestrator.ask(place_of(each, FIRST).node, Describe))[0]
            for each in swarm.nodes
            if each.is_alive
        ]
        took = time.perf_counter() - began
        if all(isinstance(a, Described) and all(i.streams == 0 for i in a.shards) for a in answers):
            return took
        assert took <= within_s, "sessions are left"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("after", ["no token", "some tokens"])
def test_cancellation_frees_every_shard_within_a_second(after: str, swarm: LocalSwarm) -> None:
    async def ask() -> float:
        async with head_node(swarm.addresses) as node:
            model = await RemoteModel.find(node, TINY)
            request = msgspec.structs.replace(model.request(PROMPT, GREEDY, 400), eos=())
            chat = node.orchestrator.chat(request, DistributedChatParams())
            if after == "no token":
                first = asyncio.ensure_future(anext(chat))
                await asyncio.sleep(0.002)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            else:
                for _ in range(20):
                    await anext(chat)
            await chat.aclose()
            return await wait_until_free(node, swarm, 1.0)

    print(f"\nfree after {run(ask()) * 1000:.0f} ms")


def test_a_head_that_dies_frees_every_shard_within_a_second(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> float:
        async with head_node(swarm.addresses) as watcher:
            command = [
                os.path.join(os.path.dirname(os.sys.executable), "potluck"), "ask", "--via", ",".join(swarm.addresses),
                "--max-tokens", "400", "hello",
            ]  # fmt: skip
            head = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            assert head.stdout is not None
            await head.stdout.read(1)
            head.kill()
            await head.wait()
            return await wait_until_free(watcher, swarm, 1.0)

    print(f"\nfree after {run(ask()) * 1000:.0f} ms")


# ---------------------------------------------------------------- pmetal's sampler cases, in our names


def test_greedy_argmax_picks_max() -> None:
    assert choose(np.array([0.1, 0.5, 0.9, 0.2], np.float32), SamplingParams()).token == 2


def test_greedy_argmax_last_position_multi_step(models_home: Path) -> None:
    """Several positions in one step: the last one's logits choose, and they are what they are one by one."""
    entry, store = stored_tiny(models_home), ModelStore(models_home / "models")
    model = LocalModel(store.open(TINY), source=entry.weights_sha256, cache_folder=store.packed_folder(TINY), threads=1)
    together, alone = model.engine.open(8), model.engine.open(8)
    [result] = model.engine.forward([EngineStep(together, 0, tokens=list(PROMPT[:3]), logits=(2,))])
    singles = [
        model.engine.forward([EngineStep(alone, position, tokens=[token], logits=(0,))])[0].logits
        for position, token in enumerate(PROMPT[:3])
    ]
    model.close()
    assert result.logits is not None
    assert singles[2] is not None
    assert result.logits[0].tobytes() == singles[2][0].tobytes()
    assert choose(result.logits[0], GREEDY).token == int(np.argmax(singles[2][0]))


def test_greedy_argmax_rejects_what_is_no_row_of_logits() -> None:
    with pytest.raises((PotluckError, ValueError)):
        choose(np.empty(0, np.float32), SamplingParams())
