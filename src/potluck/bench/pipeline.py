"""What a split costs: shards as real nodes on loopback over TLS, one thread each, against the unsplit model on one thread.

Both sides take turns within one run, and only ratios are compared: of each round, as a machine is not the same from one to the next.
The head runs in this process, as it does in `potluck ask --via`.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from potluck.bench.own_engine import ModelFile, OwnEngine
from potluck.core.sampling_params import SamplingParams
from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.loop import run
from potluck.net.tls import TlsTransport
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.orchestrator.frames import PipelineAborted, TokenDelta
from potluck.orchestrator.generation import GenerationSettings, StepTiming
from potluck.orchestrator.params import DistributedChatParams
from potluck.testing.local_swarm import LocalSwarm, split_plan

Say = Callable[[str], None]
_NO_END = SamplingParams(logit_bias={})


class PipelineBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as in the store
    file: ModelFile
    layer_count: int
    rounds: int = 15  # neighbours on the host move one round's ratio by several percent
    large_rounds: int = 31
    decode_tokens: int = 64
    prefill_tokens: int = 1024
    batch: int = 8
    shard_counts: tuple[int, ...] = (2, 4, 8)


class HopFigures(msgspec.Struct, frozen=True):
    """Per hop, in milliseconds, over all decoded tokens of a configuration."""

    shards: int
    hop_p50_ms: float
    hop_p95_ms: float
    compute_ms: float
    queue_ms: float
    wire_ms: float
    tokens_per_s: float


class LargeSplit(msgspec.Struct, frozen=True):
    """Decode of a model of a real one's size."""

    model: str
    split_ratio: float
    unsplit_tokens_per_s: float
    split_tokens_per_s: float
    hop: HopFigures


class PipelineReport(msgspec.Struct, frozen=True):
    model: str
    split_ratio: float
    hop_p50_ms: float
    hop_p95_ms: float
    prefill_ratio: float
    batch_ratio: float
    unsplit_tokens_per_s: float
    split_tokens_per_s: float
    unsplit_prefill_tokens_per_s: float
    split_prefill_tokens_per_s: float
    hops: tuple[HopFigures, ...]
    large: LargeSplit | None = None


class Head:
    """A connected head with one model."""

    def __init__(self, node: Node, model: RemoteModel) -> None:
        self._node, self._model = node, model

    async def tokens(self, prompt: Sequence[int], count: int) -> tuple[list[float], list[StepTiming]]:
        """When each token came (seconds from the start), and each one's breakdown. No end-of-text stops it."""
        request = self._model.request(prompt, _NO_END, count)
        request = msgspec.structs.replace(request, eos=())
        began = time.perf_counter()
        times: list[float] = []
        timings: list[StepTiming] = []
        params = DistributedChatParams(settings=GenerationSettings(), on_timing=timings.append)
        async for frame in self._node.orchestrator.chat(request, params):
            if isinstance(frame, TokenDelta):
                times.append(time.perf_counter() - began)
            assert not isinstance(frame, PipelineAborted), frame
        return times, timings


@asynccontextmanager
async def connected(swarm: LocalSwarm, model: str) -> AsyncIterator[Head]:
    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        await node.orchestrator.connect(swarm.addresses)
        yield Head(node, await RemoteModel.find(node, model))
    finally:
        await node.stop()


def bench_pipeline(settings: PipelineBenchSettings, say: Say) -> PipelineReport:
    """Two shards first, with everything; then the growth of a hop's cost over more shards."""
    first, *others = settings.shard_counts
    report, hops = _two_sides(settings, first, say)
    for shards in others:
        say(f"{shards} shards")
        with LocalSwarm(settings.model, split_plan(settings.layer_count, shards, 0)) as swarm:
            hops.append(run(_hops(settings, swarm, shards)))
    return msgspec.structs.replace(report, hops=tuple(hops))


def _two_sides(settings: PipelineBenchSettings, shards: int, say: Say) -> tuple[PipelineReport, list[HopFigures]]:
    say(f"{shards} shards against the unsplit model")
    plan = split_plan(settings.layer_count, shards, 0)
    with OwnEngine(settings.file, 1) as ours, LocalSwarm(settings.model, plan) as swarm:
        return run(_compare(settings, ours, swarm, shards))


async def _compare(
    settings: PipelineBenchSettings, ours: OwnEngine, swarm: LocalSwarm, shards: int
) -> tuple[PipelineReport, list[HopFigures]]:
    prompt = [100 + i * 7919 % 1500 for i in range(settings.prefill_tokens)]
    unsplit, split, unsplit_prefill, split_prefill, alone, together = [], [], [], [], [], []
    timings: list[StepTiming] = []
    async with connected(swarm, settings.model) as head:
        await head.tokens(prompt[:8], 16)
        for _ in range(settings.rounds):
            unsplit.append(ours.decode(prompt[:8], settings.decode_tokens))
            times, steps = await head.tokens(prompt[:8], settings.decode_tokens)
            split.append(speed_of(times))
            alone.append(len(times) / times[-1])
            timings += steps[1:]
            unsplit_prefill.append(ours.prefill(prompt))
            times, _ = await head.tokens(prompt, 1)
            split_prefill.append(len(prompt) / times[0])
            together.append(await _together(head, prompt[:8], settings))
    figures = hop_figures(timings, shards, statistics.median(split))
    report = PipelineReport(
        settings.model, ratio_of(split, unsplit), figures.hop_p50_ms, figures.hop_p95_ms,
        ratio_of(split_prefill, unsplit_prefill), ratio_of(together, alone), statistics.median(unsplit),
        statistics.median(split), statistics.median(unsplit_prefill), statistics.median(split_prefill), (),
    )  # fmt: skip
    return report, [figures]


def ratio_of(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


async def _together(head: Head, prompt: Sequence[int], settings: PipelineBenchSettings) -> float:
    """All tokens of several sessions at once, per second, from asking to the last one; to be compared with one measured so too."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(head.tokens(prompt, settings.decode_tokens) for _ in range(settings.batch)))
    return sum(len(times) for times, _ in counts) / (time.perf_counter() - began)


async def _hops(settings: PipelineBenchSettings, swarm: LocalSwarm, shards: int) -> HopFigures:
    timings: list[StepTiming] = []
    speeds = []
    async with connected(swarm, settings.model) as head:
        for _ in range(settings.rounds):
            times, steps = await head.tokens([1, 2, 3, 4], settings.decode_tokens)
            timings += steps[1:]
            speeds.append(speed_of(times))
    return hop_figures(timings, shards, statistics.median(speeds))


def speed_of(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def hop_figures(timings: Sequence[StepTiming], shards: int, speed: float) -> HopFigures:
    """Everything but computing, divided by the hops of a token's way round: the ring has as many as there are shards."""
    own = sorted((timing.total_s - timing.compute_s) / shards * 1000 for timing in timings)
    compute = [timing.compute_s * 1000 for timing in timings]
    queue = [timing.queue_s * 1000 for timing in timings]
    wire = [(t.total_s - t.compute_s - t.queue_s) * 1000 for t in timings]
    return HopFigures(
        shards, own[len(own) // 2], own[int(len(own) * 0.95)], statistics.median(compute), statistics.median(queue),
        statistics.median(wire), speed,
    )  # fmt: skip
