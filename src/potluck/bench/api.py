"""Load against a node's API as clients see it: time to first token, time between tokens, throughput, at several numbers of clients.

Every client asks one question after the other; each answer has the same number of tokens. Refusals (429, 503) are counted, not hidden.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from potluck.client import ApiError, AsyncClient, Text, Usage
from potluck.core.errors import BenchmarkFailed

Say = Callable[[str], None]
# Told apart at its beginning: shards keep what they have computed, and the same question again would have its first token at once.
_QUESTION = "{}: write a long story about a dinner to which everyone brings a dish."


class ApiBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    key: str | None = None
    model: str | None = None
    clients: tuple[int, ...] = (1, 4, 16, 64)
    requests_per_client: int = 2
    tokens: int = 32
    most_s: float = 90.0  # for one number of clients; what has not come by then is not counted


class LoadFigures(msgspec.Struct, frozen=True):
    clients: int
    answers: int
    refused: int
    first_token_p50_ms: float
    first_token_p95_ms: float
    between_p50_ms: float
    between_p95_ms: float
    tokens_per_s: float


class ApiReport(msgspec.Struct, frozen=True):
    url: str
    model: str
    tokens_per_answer: int
    loads: tuple[LoadFigures, ...]


@dataclass
class _Seen:
    """What all clients of one load saw."""

    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    refused: int = 0


async def bench_api(settings: ApiBenchSettings, say: Say) -> ApiReport:
    async with AsyncClient(settings.url, settings.key, settings.model) as client:
        models = await _warmed_up(client, settings)
        loads = []
        for count in settings.clients:
            say(f"{count} clients")
            loads.append(await _load(client, settings, count))
    return ApiReport(settings.url, settings.model or models[0], settings.tokens, tuple(loads))


async def _warmed_up(client: AsyncClient, settings: ApiBenchSettings) -> list[str]:
    """What is on offer; whoever loads on demand has loaded now."""
    try:
        models = await client.models()
        if models:
            await client.ask(_QUESTION.format("Warm up"), max_tokens=4, temperature=0)
    except (ApiError, httpx.HTTPError) as error:
        raise BenchmarkFailed(f"{settings.url} cannot be measured: {error}") from None
    if not models:
        raise BenchmarkFailed(f"{settings.url} serves no model now")
    return models


async def _load(client: AsyncClient, settings: ApiBenchSettings, count: int) -> LoadFigures:
    seen = _Seen()
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(settings.most_s), asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(_one_client(client, settings, number, seen))
    except TimeoutError:
        pass  # the slowest machines: the figures are of what came in time
    elapsed_s = time.perf_counter() - began_s
    if not seen.firsts_s:
        raise BenchmarkFailed(f"with {count} clients no answer came within {settings.most_s:g} s")
    return LoadFigures(
        count, seen.answers, seen.refused, *_percentiles_ms(seen.firsts_s), *_percentiles_ms(seen.gaps_s),
        seen.tokens / elapsed_s,
    )  # fmt: skip


async def _one_client(client: AsyncClient, settings: ApiBenchSettings, number: int, seen: _Seen) -> None:
    for turn in range(settings.requests_per_client):
        try:
            await _one_answer(client, settings, number * 1000 + turn, seen)
        except ApiError as error:
            if error.status not in (429, 503):
                raise BenchmarkFailed(f"the API answered: {error}") from None
            seen.refused += 1
            await asyncio.sleep(min(error.retry_after_s or 1, 2))


async def _one_answer(client: AsyncClient, settings: ApiBenchSettings, seed: int, seen: _Seen) -> None:
    last_s = began_s = time.perf_counter()
    is_first = True
    async for event in client.chat(_QUESTION.format(seed), max_tokens=settings.tokens, temperature=0.7, seed=seed):
        now_s = time.perf_counter()
        if isinstance(event, Text):
            (seen.firsts_s if is_first else seen.gaps_s).append(now_s - (began_s if is_first else last_s))
            is_first, last_s = False, now_s
        elif isinstance(event, Usage):
            seen.tokens += event.completion_tokens
            seen.answers += 1


def _percentiles_ms(values_s: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values_s) or [0.0]
    return ordered[len(ordered) // 2] * 1000, ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)] * 1000
