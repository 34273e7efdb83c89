"""What a split costs: shards as real nodes on loopback over TLS, one thread each, against the unsplit model on one thread.

Both sides take turns within one run, and only ratios are compared: of each round, as a machine is not the same from one to the next,
and over several launches of the nodes, as one launch is a percent faster or slower than another. The head runs in this process, as it
does in `potluck ask --via`.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

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
_SHARDS = 2


class PipelineBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as in the store
    file: ModelFile
    layer_count: int
    launches: int = 3
    growth_launches: int = 6
    rounds: int = 5  # of each launch; neighbours on the host move one round's ratio by several percent
    large_rounds: int = 11
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


class AddedHop(msgspec.Struct, frozen=True):
    """What each hop costs that lies between two numbers of shards: the mean of the launches, and its standard error."""

    from_shards: int
    to_shards: int
    mean_ms: float
    error_ms: float


class Growth(msgspec.Struct, frozen=True):
    """The same model over ever more shards."""

    hops: tuple[HopFigures, ...]
    added: tuple[AddedHop, ...]


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
    hop: HopFigures
    growth: Growth | None = None
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


@dataclass
class DecodeRounds:
    """Tokens per second of both sides, round by round, and the split's tokens one by one."""

    unsplit: list[float] = field(default_factory=list)
    split: list[float] = field(default_factory=list)
    timings: list[StepTiming] = field(default_factory=list)

    async def measure(self, ours: OwnEngine, head: Head, prompt: Sequence[int], tokens: int) -> list[float]:
        """One round; returns when each of the split's tokens came."""
        self.unsplit.append(ours.decode(prompt, tokens))
        times, steps = await head.tokens(prompt, tokens)
        self.split.append(speed_of(times))
        self.timings += steps[1:]
        return times

    @property
    def ratio(self) -> float:
        return ratio_of(self.split, self.unsplit)

    def hop(self, shards: int) -> HopFigures:
        return hop_figures(self.timings, shards, statistics.median(self.split))


@dataclass
class _Rounds:
    """The same for all that two shards are asked for. `alone`: one session, as `together` counts several."""

    decode: DecodeRounds = field(default_factory=DecodeRounds)
    unsplit_prefill: list[float] = field(default_factory=list)
    split_prefill: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)


def bench_pipeline(settings: PipelineBenchSettings, say: Say) -> PipelineReport:
    """Two shards against the unsplit model."""
    measured = _two_sides(settings, say)
    hop = measured.decode.hop(_SHARDS)
    return PipelineReport(
        model=settings.model,
        split_ratio=measured.decode.ratio,
        hop_p50_ms=hop.hop_p50_ms,
        hop_p95_ms=hop.hop_p95_ms,
        prefill_ratio=ratio_of(measured.split_prefill, measured.unsplit_prefill),
        batch_ratio=ratio_of(measured.together, measured.alone),
        unsplit_tokens_per_s=statistics.median(measured.decode.unsplit),
        split_tokens_per_s=statistics.median(measured.decode.split),
        unsplit_prefill_tokens_per_s=statistics.median(measured.unsplit_prefill),
        split_prefill_tokens_per_s=statistics.median(measured.split_prefill),
        hop=hop,
    )


def _two_sides(settings: PipelineBenchSettings, say: Say) -> _Rounds:
    plan = split_plan(settings.layer_count, _SHARDS, 0)
    measured = _Rounds()
    with OwnEngine(settings.file, 1) as ours:
        for launch in range(settings.launches):
            say(f"{_SHARDS} shards against the unsplit model, launch {launch + 1} of {settings.launches}")
            with LocalSwarm(settings.model, plan) as swarm:
                run(_compare(settings, ours, swarm, measured))
    return measured


async def _compare(settings: PipelineBenchSettings, ours: OwnEngine, swarm: LocalSwarm, measured: _Rounds) -> None:
    prompt = [100 + i * 7919 % 1500 for i in range(settings.prefill_tokens)]
    async with connected(swarm, settings.model) as head:
        await head.tokens(prompt[:8], 16)
        for _ in range(settings.rounds):
            times = await measured.decode.measure(ours, head, prompt[:8], settings.decode_tokens)
            measured.alone.append(len(times) / times[-1])
            measured.unsplit_prefill.append(ours.prefill(prompt))
            times, _ = await head.tokens(prompt, 1)
            measured.split_prefill.append(len(prompt) / times[0])
            measured.together.append(await _together(head, prompt[:8], settings))


def ratio_of(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


async def _together(head: Head, prompt: Sequence[int], settings: PipelineBenchSettings) -> float:
    """All tokens of several sessions at once, per second, from asking to the last one; to be compared with one measured so too."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(head.tokens(prompt, settings.decode_tokens) for _ in range(settings.batch)))
    return sum(len(times) for times, _ in counts) / (time.perf_counter() - began)


def speed_of(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def own_ms(timing: StepTiming) -> float:
    """Of a token's way round, everything but computing."""
    return (timing.total_s - timing.compute_s) * 1000


def hop_figures(timings: Sequence[StepTiming], shards: int, speed: float) -> HopFigures:
    """A token's way round the ring has as many hops as there are shards."""
    own = sorted(own_ms(timing) / shards for timing in timings)
    compute = [timing.compute_s * 1000 for timing in timings]
    queue = [timing.queue_s * 1000 for timing in timings]
    wire = [(t.total_s - t.compute_s - t.queue_s) * 1000 for t in timings]
    return HopFigures(
        shards, own[len(own) // 2], own[int(len(own) * 0.95)], statistics.median(compute), statistics.median(queue),
        statistics.median(wire), speed,
    )  # fmt: skip
