"""How often and how long an answer stumbles when its shards are killed or stopped: real processes on loopback over TLS.

For each number of shards a swarm with two spares; each way to ask has an undisturbed reference; every disturbed answer must equal it.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from potluck.net.loop import run
from potluck.testing.chaos import CONFIGURATIONS, Blow, ChaosHead, Configuration, Hand, RunOutcome, deal
from potluck.testing.local_swarm import LocalSwarm, split_plan

Say = Callable[[str], None]


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as in the store
    layer_count: int
    kills: int = 30
    seed: int = 0
    shard_counts: tuple[int, ...] = (2, 3, 4)
    spares: int = 2
    prompt_tokens: int = 160
    max_tokens: int = 48
    home: Path | None = None
    configurations: tuple[Configuration, ...] = CONFIGURATIONS


class KindFigures(msgspec.Struct, frozen=True):
    """Runs of one kind, named after their first blow."""

    kind: str
    runs: int
    identical: int
    pause_p50_ms: float
    pause_max_ms: float


class Mismatch(msgspec.Struct, frozen=True):
    shards: int
    configuration: str
    blows: tuple[Blow, ...]
    aborted: str


class ChaosReport(msgspec.Struct, frozen=True):
    """`kills` disturbed answers, `identical` of them equal to the undisturbed one. Pauses are those of failovers."""

    model: str
    seed: int
    kills: int
    identical: int
    signals: int
    failovers: int
    pause_p50_ms: float
    pause_p95_ms: float
    pause_max_ms: float
    kinds: tuple[KindFigures, ...]
    mismatches: tuple[Mismatch, ...]


class DisturbedRun(msgspec.Struct, frozen=True):
    shards: int
    configuration: Configuration
    blows: tuple[Blow, ...]
    outcome: RunOutcome
    is_identical: bool


def bench_chaos(settings: ChaosSettings, say: Say) -> ChaosReport:
    """All runs, one swarm after the other. Every process that was started is gone afterwards, also after an error."""
    draw = random.Random(settings.seed)  # noqa: S311  # draws blows, not secrets
    runs: list[DisturbedRun] = []
    for shards, hands in deal(draw, _shares(settings), settings.configurations).items():
        if not hands:
            continue
        say(f"{shards} shards and {settings.spares} spares: {len(hands)} disturbed answers")
        plan = split_plan(settings.layer_count, shards, settings.spares)
        with LocalSwarm(settings.model, plan, settings.home) as swarm:
            runs += run(disturbed_runs(settings, swarm, shards, hands, draw, say))
    return summary(settings, runs)


def _shares(settings: ChaosSettings) -> dict[int, int]:
    """How many answers each number of shards gets, as equal as can be."""
    edges = [settings.kills * i // len(settings.shard_counts) for i in range(len(settings.shard_counts) + 1)]
    return {shards: stop - start for shards, (start, stop) in zip(settings.shard_counts, pairwise(edges), strict=True)}


async def disturbed_runs(
    settings: ChaosSettings, swarm: LocalSwarm, shards: int, hands: Sequence[Hand], draw: random.Random, say: Say
) -> list[DisturbedRun]:
    prompt = [1 + draw.randrange(400) for _ in range(settings.prompt_tokens)]
    runs: list[DisturbedRun] = []
    async with ChaosHead.on(swarm, settings.model, prompt, settings.max_tokens) as head:
        await head.heal()
        for hand in hands:
            expected = await head.reference(hand.configuration)
            outcome = await head.disturbed(hand.configuration, hand.blows)
            runs.append(DisturbedRun(shards, hand.configuration, hand.blows, outcome, outcome.said == expected.said))
            say(told(runs[-1]))
            await head.heal()
    return runs


def told(disturbed: DisturbedRun) -> str:
    verdict = "identical" if disturbed.is_identical else f"DIFFERENT {disturbed.outcome.aborted}"
    pauses = ", ".join(f"{pause:.0f} ms" for pause in disturbed.outcome.pauses_ms) or "none"
    what = " + ".join(f"{blow.kind} of stage {blow.place}" for blow in disturbed.outcome.struck) or "missed"
    return f"  {disturbed.configuration}: {what}: {verdict}, pauses {pauses}"


def summary(settings: ChaosSettings, runs: Sequence[DisturbedRun]) -> ChaosReport:
    pauses = sorted(pause for each in runs for pause in each.outcome.pauses_ms)
    kinds: dict[str, list[DisturbedRun]] = {}
    for each in runs:
        kinds.setdefault(kind_of(each.outcome.struck), []).append(each)
    return ChaosReport(
        model=settings.model,
        seed=settings.seed,
        kills=len(runs),
        identical=sum(each.is_identical for each in runs),
        signals=sum(len(each.outcome.struck) for each in runs),
        failovers=len(pauses),
        pause_p50_ms=_quantile(pauses, 0.5),
        pause_p95_ms=_quantile(pauses, 0.95),
        pause_max_ms=_quantile(pauses, 1.0),
        kinds=tuple(_figures(kind, group) for kind, group in sorted(kinds.items())),
        mismatches=tuple(
            Mismatch(each.shards, str(each.configuration), each.blows, each.outcome.aborted)
            for each in runs
            if not each.is_identical
        ),
    )


def kind_of(struck: Sequence[Blow]) -> str:
    if not struck:
        return "missed"
    if len(struck) == 1:
        return struck[0].kind
    is_later = any(blow.moment == "recovery" for blow in struck)
    return "two, the second during recovery" if is_later else f"two at once, {struck[0].moment}"


def _figures(kind: str, runs: Sequence[DisturbedRun]) -> KindFigures:
    pauses = sorted(pause for each in runs for pause in each.outcome.pauses_ms)
    median = statistics.median(pauses) if pauses else 0.0
    identical = sum(each.is_identical for each in runs)
    return KindFigures(kind, len(runs), identical, round(median, 1), round(max(pauses, default=0.0), 1))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed; 0 where there is none."""
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))], 1)
