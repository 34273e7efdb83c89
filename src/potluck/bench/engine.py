"""The measurements of `potluck bench engine`: our engine, and llama.cpp beside it where that is wanted.

Both sides get the same file, token ids and number of threads, and take turns: whatever else the machine does meets both.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from potluck.bench.bandwidth import read_bandwidth
from potluck.bench.busy_core import busy_core
from potluck.bench.llama_cpp import LlamaCppEngine, LlamaCppProcess
from potluck.bench.machine import foreign_load, processor_name
from potluck.bench.own_engine import ModelFile, OwnEngine, token_ids
from potluck.bench.random_model import RandomFormat, RandomShape, random_model
from potluck.bench.report import (
    BATCH_SESSIONS,
    DEPTH,
    PREFILL_TOKENS,
    VERIFY_TOKENS,
    BusyCoreFigures,
    Contest,
    EngineReport,
    LargeFigures,
    ThreadFigures,
)
from potluck.core.errors import BadRequest
from potluck.core.processors import usable_cores

Say = Callable[[str], None]
LARGE_FORMATS: tuple[RandomFormat, ...] = ("Q4_0", "Q4_K")
_PROMPT_TOKENS = 8
# After its turn a side may leave threads spinning for a moment; nobody is measured before they sleep.
_SETTLE_S = 0.1


class EngineBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, and how long."""

    name: str
    model: ModelFile
    cache_folder: Path  # for the random models
    threads: tuple[int, ...] = (1, 2)
    is_against_llama_cpp: bool = False
    rounds: int = 5
    decode_tokens: int = 64
    deep_tokens: int = 32
    large_tokens: int = 16
    step_repeats: int = 16
    large_shape: RandomShape | None = RandomShape()

    @property
    def context(self) -> int:
        """Positions that the longest measurement takes."""
        return DEPTH + max(self.decode_tokens, self.deep_tokens) + 1


class Contestant(Protocol):
    """Whoever can be measured. Prompts of `decode` stay in its KV from call to call."""

    def decode(self, prompt: Sequence[int], count: int) -> float: ...

    def prefill(self, prompt: Sequence[int]) -> float: ...


Measure = Callable[[Contestant], float]


def bench_engine(settings: EngineBenchSettings, say: Say) -> EngineReport:
    """Runs everything, in a few minutes. Raises BenchmarkFailed where figures would not be fair."""
    description = None
    if settings.is_against_llama_cpp:
        with LlamaCppProcess() as process:  # refuses before minutes are spent
            description = process.describe()
    with OwnEngine(settings.model, 1, say) as ours:
        require_context(ours.facts.context_length, settings.context)
        kernels = ours.processor
    load_before = foreign_load()
    figures = {threads: _thread_figures(settings, threads, say) for threads in settings.threads}
    busy = _busy_core_figures(settings, say) if {1, 2} <= set(settings.threads) else None
    return EngineReport(
        model=settings.name,
        file=str(settings.model.path),
        rounds=settings.rounds,
        processor=processor_name(),
        cores=usable_cores(),
        kernels=kernels,
        other_load=max(load_before, foreign_load()),
        threads=figures,
        busy_core=busy,
        llama_cpp_version=description.version if description else None,
        llama_cpp_system_info=description.system_info if description else None,
    )


def require_context(available: int, wanted: int) -> None:
    if available < wanted:
        raise BadRequest(f"this model's context of {available} is too short; the benchmark needs {wanted} positions")


def alternate(rounds: int, measures: Sequence[Callable[[], float]], settle_s: float = _SETTLE_S) -> list[list[float]]:
    """Each measure in turn, `rounds` times, after one turn that does not count."""
    results: list[list[float]] = [[] for _ in measures]
    for turn in range(rounds + 1):
        for measure, values in zip(measures, results, strict=True):
            time.sleep(settle_s)
            value = measure()
            if turn > 0:
                values.append(value)
    return results


def _contest(rounds: int, contestants: Sequence[Contestant], measure: Measure) -> Contest:
    turns = [functools.partial(measure, contestant) for contestant in contestants]
    return Contest(*(tuple(values) for values in alternate(rounds, turns)))


@contextlib.contextmanager
def _contestants(
    settings: EngineBenchSettings, model: ModelFile, threads: int, say: Say
) -> Iterator[tuple[OwnEngine, LlamaCppEngine | None]]:
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(OwnEngine(model, threads, say))
        theirs = None
        if settings.is_against_llama_cpp:
            theirs = stack.enter_context(LlamaCppProcess()).load(model.path, threads, settings.context)
        yield ours, theirs


def _thread_figures(settings: EngineBenchSettings, threads: int, say: Say) -> ThreadFigures:
    with _contestants(settings, settings.model, threads, say) as (ours, theirs):
        everybody: list[Contestant] = [ours] if theirs is None else [ours, theirs]
        ids = token_ids(DEPTH, ours.facts.vocabulary_size)

        def contest(what: str, measure: Measure) -> Contest:
            say(f"{what}, {_shown(threads)}")
            return _contest(settings.rounds, everybody, measure)

        decode = contest("decode", lambda side: side.decode(ids[:_PROMPT_TOKENS], settings.decode_tokens))
        prefill = contest(f"prefill of {PREFILL_TOKENS}", lambda side: side.prefill(ids[:PREFILL_TOKENS]))
        deep_decode = contest(f"decode at depth {DEPTH}", lambda side: side.decode(ids, settings.deep_tokens))
        say(f"steps of {VERIFY_TOKENS}, {BATCH_SESSIONS} sessions, {_shown(threads)}")
        one_step, verify_step = _verify(ours, ids, settings)
        one_session, all_sessions = _batch(ours, settings)
        threads_used = None if theirs is None else statistics.median(theirs.threads_used)
    return ThreadFigures(
        decode=decode,
        prefill=prefill,
        deep_decode=deep_decode,
        one_step_s=one_step,
        verify_step_s=verify_step,
        one_session=one_session,
        all_sessions=all_sessions,
        large=_large(settings, threads, say),
        llama_cpp_threads_used=threads_used,
    )


def _shown(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _verify(ours: OwnEngine, ids: list[int], settings: EngineBenchSettings) -> tuple[tuple[float, ...], ...]:
    prompt, repeats = ids[:_PROMPT_TOKENS], settings.step_repeats
    turns = [functools.partial(ours.step_s, prompt, width, repeats) for width in (1, VERIFY_TOKENS)]
    return tuple(tuple(values) for values in alternate(settings.rounds, turns))


def _batch(ours: OwnEngine, settings: EngineBenchSettings) -> tuple[tuple[float, ...], ...]:
    vocabulary, count = ours.facts.vocabulary_size, settings.decode_tokens // 2
    prompts = [token_ids(_PROMPT_TOKENS, vocabulary, first=100 * number) for number in range(BATCH_SESSIONS)]
    turns = [lambda: ours.decode(prompts[0], count), lambda: ours.decode_together(prompts, count)]
    return tuple(tuple(values) for values in alternate(settings.rounds, turns))


def _large(settings: EngineBenchSettings, threads: int, say: Say) -> dict[str, LargeFigures]:
    shape = settings.large_shape
    if shape is None:
        return {}
    return {name: _large_figures(settings, shape, name, threads, say) for name in LARGE_FORMATS}


def _large_figures(
    settings: EngineBenchSettings, shape: RandomShape, format_name: RandomFormat, threads: int, say: Say
) -> LargeFigures:
    path = random_model(settings.cache_folder / "bench", shape, format_name, say)
    model = ModelFile(path, path.stem, path.parent / "packed" / path.stem)
    with _contestants(settings, model, threads, say) as (ours, theirs):
        say(f"decode of {path.stem}, {_shown(threads)}")
        prompt = token_ids(_PROMPT_TOKENS, ours.facts.vocabulary_size)
        turns = [lambda: read_bandwidth(threads, rounds=1), lambda: ours.decode(prompt, settings.large_tokens)]
        if theirs is not None:
            turns.append(lambda: theirs.decode(prompt, settings.large_tokens))
        bandwidth, *speeds = alternate(settings.rounds, turns)
        return LargeFigures(
            decode=Contest(*(tuple(values) for values in speeds)),
            bytes_per_token=ours.bytes_per_token,
            read_bandwidth=tuple(bandwidth),
        )


def _busy_core_figures(settings: EngineBenchSettings, say: Say) -> BusyCoreFigures:
    say("decode beside a busy core, 1 and 2 threads")
    rounds = 8 * settings.rounds  # the scheduler's moods come on top of the usual noise
    with _one_and_two(settings, say) as engines:
        alternate(1, _turns(engines, settings))  # they learn what is usual before the core gets busy
        with busy_core():
            before = alternate(rounds, _turns(engines, settings))
    with busy_core(), _one_and_two(settings, say) as engines:
        beside = alternate(rounds, _turns(engines, settings))
    return BusyCoreFigures(
        one_thread=tuple(before[0]),
        two_threads=tuple(before[1]),
        one_thread_started_beside=tuple(beside[0]),
        two_threads_started_beside=tuple(beside[1]),
    )


@contextlib.contextmanager
def _one_and_two(settings: EngineBenchSettings, say: Say) -> Iterator[list[OwnEngine]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(OwnEngine(settings.model, n, say)) for n in (1, 2)]


def _turns(engines: Sequence[OwnEngine], settings: EngineBenchSettings) -> list[Callable[[], float]]:
    prompt = token_ids(_PROMPT_TOKENS, engines[0].facts.vocabulary_size)
    return [functools.partial(engine.decode, prompt, settings.decode_tokens) for engine in engines]
