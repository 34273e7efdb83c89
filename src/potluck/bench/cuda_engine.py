"""`potluck bench engine --device cuda`: the engine on a GPU with random weights of real shapes, beside what the GPU can do at best."""

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from potluck.core.errors import BenchmarkFailed, DeviceUnavailable
from potluck.core.extras import how_to_install
from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.engine.shard_engine import EngineSettings, ShardEngine, Step
from potluck.weights.checkpoint import TensorFormat
from potluck.weights.random_checkpoint import RANDOM_MODELS, RandomCheckpoint, open_random, random_name

Say = Callable[[str], None]
DEFAULT_MODELS: tuple[tuple[str, TensorFormat], ...] = (
    ("qwen2.5-7b", "BF16"),
    ("qwen2.5-3b", "BF16"),
    ("llama-3.2-3b", "BF16"),
    ("qwen2.5-7b", "Q4_0"),
    ("qwen2.5-7b", "Q4_K"),
)
_STREAMS = 32
_PROMPT = 128


class CudaBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    device: str = "cuda"
    models: tuple[tuple[str, TensorFormat], ...] = DEFAULT_MODELS
    rounds: int = 5
    decode_tokens: int = 64
    prefill_tokens: int = 4096
    is_batch_invariant: bool = False
    kv_budget_bytes: int = 8 << 30


class CudaFigures(msgspec.Struct, frozen=True):
    model: str
    format: str
    weight_bytes_per_token: int
    decode_tokens_per_s: float
    share_of_bandwidth: float
    streams_tokens_per_s: float
    streams_ratio: float
    deep_tokens_per_s: float
    prefill_tokens_per_s: float
    share_of_matrix_rate: float


class CudaReport(msgspec.Struct, frozen=True):
    gpu: str
    copy_bytes_per_s: float
    matrix_operations_per_s: float
    figures: tuple[CudaFigures, ...]


def bench_cuda_engine(settings: CudaBenchSettings, say: Say) -> CudaReport:
    """Raises BenchmarkFailed, loudly, where there is no GPU."""
    try:
        from potluck.engine.cuda.ceilings import copy_bandwidth, matrix_rate
        from potluck.engine.cuda.device import describe, find_device

        device = find_device(settings.device)
    except ImportError as error:
        raise BenchmarkFailed(f"skipped: torch is not installed here ({error}); {how_to_install('cuda')}") from error
    except DeviceUnavailable as error:
        raise BenchmarkFailed(f"skipped: {error}") from error
    say("what the GPU can do: copying, bf16 products")
    bandwidth, rate = copy_bandwidth(device), matrix_rate(device)
    figures = tuple(model_figures(settings, *model, bandwidth, rate, say) for model in settings.models)
    return CudaReport(describe(device), bandwidth, rate, figures)


def model_figures(
    settings: CudaBenchSettings, shape: str, format_name: TensorFormat, bandwidth: float, rate: float, say: Say
) -> CudaFigures:
    if shape not in RANDOM_MODELS:
        raise BenchmarkFailed(f"there is no random model {shape}; known: {', '.join(RANDOM_MODELS)}")
    say(f"{shape} {format_name}")
    checkpoint = open_random(random_name(shape, format_name))
    engine = open_engine(checkpoint, settings)
    try:
        one = statistics.median(
            decode_speed(engine, 1, _PROMPT, settings.decode_tokens) for _ in range(settings.rounds)
        )
        many = statistics.median(
            decode_speed(engine, _STREAMS, _PROMPT, settings.decode_tokens) for _ in range(settings.rounds)
        )
        deep = statistics.median(decode_speed(engine, 1, 4096, settings.decode_tokens) for _ in range(2))
        prefill = statistics.median(prefill_speed(engine, settings.prefill_tokens) for _ in range(settings.rounds))
    finally:
        engine.close()
    size = bytes_per_token(checkpoint)
    return CudaFigures(
        shape, format_name, size, one, one * size / bandwidth, many, many / one, deep, prefill,
        prefill * prefill_operations(checkpoint.facts, settings.prefill_tokens) / settings.prefill_tokens / rate,
    )  # fmt: skip


def open_engine(checkpoint: RandomCheckpoint, settings: CudaBenchSettings) -> ShardEngine:
    from potluck.engine.factory import build_engine

    layers = LayerRange(0, checkpoint.facts.layer_count)
    return build_engine(
        checkpoint,
        EngineSettings(
            layers=layers,
            kv_budget_bytes=settings.kv_budget_bytes,
            device=settings.device,
            is_batch_invariant=settings.is_batch_invariant,
        ),
    )


def bytes_per_token(checkpoint: RandomCheckpoint) -> int:
    """All weights that a token meets; of an embedding only what is the output too."""
    is_tied = checkpoint.facts.is_output_tied
    return sum(each.size_bytes for each in checkpoint.tensors.values() if each.name != "embedding" or is_tied)


def prefill_operations(facts: ModelFacts, tokens: int) -> float:
    """Products with layers' weights and attention's; logits are asked for one token only."""
    heads = facts.head_count * facts.head_size
    per_layer = facts.hidden_size * (
        2 * heads + 2 * facts.kv_head_count * facts.head_size + 3 * facts.feed_forward_size
    )
    attention = 2 * heads * tokens * tokens  # queries · keys and weights · values, half of it behind the mask
    return facts.layer_count * (2.0 * per_layer * tokens + attention)


def _prompt(facts: ModelFacts, count: int, seed: int) -> list[int]:
    return [(seed * 7919 + i * 104729) % facts.vocabulary_size for i in range(count)]


def decode_speed(engine: ShardEngine, streams: int, prompt_tokens: int, count: int) -> float:
    """Tokens per second of all streams together, greedy, from token ids to token ids."""
    sessions = [engine.open(prompt_tokens + count + 8) for _ in range(streams)]
    try:
        tokens = [
            _prefilled(engine, session, _prompt(engine.facts, prompt_tokens, i)) for i, session in enumerate(sessions)
        ]
        for _ in range(4):
            tokens = _step(engine, sessions, tokens)
        start = time.perf_counter()
        for _ in range(count):
            tokens = _step(engine, sessions, tokens)
        return count * streams / (time.perf_counter() - start)
    finally:
        for session in sessions:
            engine.close_session(session)


def _prefilled(engine: ShardEngine, session: int, prompt: Sequence[int]) -> int:
    [result] = engine.forward(
        [Step(session, 0, tokens=prompt, logits=[len(prompt) - 1], is_greedy=True, wants_hidden=False)]
    )
    assert result.likeliest is not None
    return result.likeliest[0]


def _step(engine: ShardEngine, sessions: Sequence[int], tokens: Sequence[int]) -> list[int]:
    steps = [
        Step(session, engine.length(session), tokens=(token,), logits=(0,), is_greedy=True, wants_hidden=False)
        for session, token in zip(sessions, tokens, strict=True)
    ]
    return [result.likeliest[0] for result in engine.forward(steps) if result.likeliest is not None]


def prefill_speed(engine: ShardEngine, count: int) -> float:
    session = engine.open(count)
    try:
        prompt = _prompt(engine.facts, count, 1)
        start = time.perf_counter()
        _prefilled(engine, session, prompt)
        return count / (time.perf_counter() - start)
    finally:
        engine.close_session(session)


def as_rows(report: CudaReport) -> list[tuple[str, ...]]:
    return [
        (
            f"{each.model} {each.format}", f"{each.decode_tokens_per_s:.0f}", f"{each.share_of_bandwidth:.1%}",
            f"{each.streams_tokens_per_s:.0f}", f"{each.streams_ratio:.1f}", f"{each.deep_tokens_per_s:.0f}",
            f"{each.prefill_tokens_per_s:.0f}", f"{each.share_of_matrix_rate:.1%}",
        )
        for each in report.figures
    ]  # fmt: skip


HEADER = (
    "MODEL",
    "TOKENS/S",
    "OF BANDWIDTH",
    f"{_STREAMS} STREAMS",
    "RATIO",
    "AT 4096",
    "PREFILL TOKENS/S",
    "OF MATRIX RATE",
)
