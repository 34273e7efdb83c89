"""`potluck bench pipeline --device cuda`: two nodes on one GPU over TLS on loopback, random weights of real shapes, against one process.

The head runs in this process and holds no weights. HearthNet's budget stands beside what was measured.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from potluck.bench.cuda_engine import CudaBenchSettings, decode_speed, open_engine
from potluck.bench.pipeline import HopFigures, hop_figures, speed_of
from potluck.core.errors import BenchmarkFailed, DeviceUnavailable, PotluckError
from potluck.core.sampling_params import SamplingParams
from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.loop import run
from potluck.net.tls import TlsTransport
from potluck.node.node import Node
from potluck.orchestrator.frames import Finished, PipelineAborted, TokenDelta
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings, StepTiming
from potluck.orchestrator.params import DistributedChatParams
from potluck.testing.local_swarm import LocalSwarm, split_plan
from potluck.weights.checkpoint import TensorFormat
from potluck.weights.random_checkpoint import RandomCheckpoint, open_random, random_name

Say = Callable[[str], None]
_PROMPT = 128
# HearthNet's budget for a 3B model over two shards.
BUDGET_TOKENS_PER_S, BUDGET_FIRST_TOKEN_MS, BUDGET_CONSTRUCTION_MS, BUDGET_HOP_MS = 8.0, 800.0, 500.0, 25.0
_WARM_UP_TOKENS = 16


class CudaPipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    device: str = "cuda"
    models: tuple[tuple[str, TensorFormat], ...] = (("qwen2.5-7b", "BF16"), ("qwen2.5-3b", "BF16"))
    rounds: int = 5
    decode_tokens: int = 128
    shards: int = 2


class CudaPipelineFigures(msgspec.Struct, frozen=True):
    model: str
    format: str
    one_process_tokens_per_s: float
    split_tokens_per_s: float
    split_ratio: float
    first_token_ms: float  # a prompt of 128 tokens
    construction_ms: float  # sessions opened and the first token of a prompt of 8 there
    hop: HopFigures
    exactness: str


class Answer(msgspec.Struct, frozen=True):
    times_s: list[float]
    timings: list[StepTiming]
    exactness: str


def bench_cuda_pipeline(settings: CudaPipelineSettings, say: Say) -> list[CudaPipelineFigures]:
    """Raises BenchmarkFailed, loudly, where there is no GPU."""
    return [_model_figures(settings, random_name(*model), say) for model in settings.models]


def _model_figures(settings: CudaPipelineSettings, name: str, say: Say) -> CudaPipelineFigures:
    checkpoint = open_random(name)
    say(f"{name}: one process")
    alone = _one_process(settings, checkpoint)
    say(f"{name}: {settings.shards} nodes")
    plan = split_plan(checkpoint.facts.layer_count, settings.shards, 0, device=settings.device)
    try:
        with LocalSwarm(name, plan) as swarm:
            return run(_measure(settings, checkpoint, name, swarm, alone))
    except PotluckError as error:
        raise BenchmarkFailed(f"{name}: {error}") from error


def _one_process(settings: CudaPipelineSettings, checkpoint: RandomCheckpoint) -> float:
    try:
        engine = open_engine(checkpoint, CudaBenchSettings(device=settings.device))
    except (ImportError, DeviceUnavailable) as error:
        raise BenchmarkFailed(f"skipped: {error}") from error
    try:
        decode_speed(engine, 1, _PROMPT, _WARM_UP_TOKENS)  # kernels are compiled and graphs captured meanwhile
        return statistics.median(
            decode_speed(engine, 1, _PROMPT, settings.decode_tokens) for _ in range(settings.rounds)
        )
    finally:
        engine.close()


async def _measure(
    settings: CudaPipelineSettings, checkpoint: RandomCheckpoint, name: str, swarm: LocalSwarm, alone: float
) -> CudaPipelineFigures:
    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        await node.orchestrator.connect(swarm.addresses)
        prompt = [(i * 104729) % checkpoint.facts.vocabulary_size for i in range(_PROMPT)]
        await _answer(node, checkpoint, name, prompt, _WARM_UP_TOKENS)
        await _answer(node, checkpoint, name, prompt[:8], 1)
        speeds, firsts, constructions, timings = [], [], [], list[StepTiming]()
        for _ in range(settings.rounds):
            answer = await _answer(node, checkpoint, name, prompt, settings.decode_tokens)
            speeds.append(speed_of(answer.times_s))
            firsts.append(answer.times_s[0] * 1000)
            timings += answer.timings[1:]
            constructions.append((await _answer(node, checkpoint, name, prompt[:8], 1)).times_s[0] * 1000)
        split = statistics.median(speeds)
        return CudaPipelineFigures(
            checkpoint.facts.name, checkpoint.format, alone, split, split / alone, statistics.median(firsts),
            statistics.median(constructions), hop_figures(timings, settings.shards, split), answer.exactness,
        )  # fmt: skip
    finally:
        await node.stop()


async def _answer(node: Node, checkpoint: RandomCheckpoint, name: str, prompt: Sequence[int], count: int) -> Answer:
    """There is no tokenizer to ask for, so the request is put together from what the shards say of themselves."""
    info = next(info for (model, _), info in node.orchestrator.store.models().items() if model == name)
    facts = checkpoint.facts
    request = GenerationRequest(
        model=name, weights_sha256=info.weights_sha256, arithmetic=info.arithmetic, layer_count=facts.layer_count,
        prompt=tuple(prompt), max_tokens=count, params=SamplingParams(), eos=(), vocabulary_size=facts.vocabulary_size,
    )  # fmt: skip
    timings: list[StepTiming] = []
    times: list[float] = []
    exactness = ""
    began = time.perf_counter()
    params = DistributedChatParams(settings=GenerationSettings(), on_timing=timings.append)
    async for frame in node.orchestrator.chat(request, params):
        if isinstance(frame, TokenDelta):
            times.append(time.perf_counter() - began)
        elif isinstance(frame, Finished):
            exactness = frame.exactness
        elif isinstance(frame, PipelineAborted):
            raise BenchmarkFailed(f"the pipeline ended with {frame.code}: {frame.message}")
    return Answer(times, timings, exactness)


def as_lines(figures: Sequence[CudaPipelineFigures]) -> list[str]:
    lines = []
    for each in figures:
        lines += [
            f"{each.model} {each.format}, exactness {each.exactness}:",
            f"  one process {each.one_process_tokens_per_s:.0f} tokens/s, split {each.split_tokens_per_s:.0f} "
            f"= {each.split_ratio:.1%}; {each.split_tokens_per_s / BUDGET_TOKENS_PER_S:.0f} x HearthNet's {BUDGET_TOKENS_PER_S:.0f}",
            _budget("first token", each.first_token_ms, BUDGET_FIRST_TOKEN_MS),
            _budget("construction to first token", each.construction_ms, BUDGET_CONSTRUCTION_MS),
            _budget("hop, p95", each.hop.hop_p95_ms, BUDGET_HOP_MS),
            f"  per token: compute {each.hop.compute_ms:.2f} ms, queues {each.hop.queue_ms:.2f} ms, wire {each.hop.wire_ms:.2f} ms",
        ]
    return lines


def _budget(what: str, measured_ms: float, budget_ms: float) -> str:
    return f"  {what} {measured_ms:.2f} ms: {budget_ms / measured_ms:.0f} x below the budget of {budget_ms:.0f} ms"
