"""What a hop costs as a pipeline grows: the same model over ever more shards, each a real node on this machine.

All numbers of shards take turns, launch by launch: the machine is not the same from one minute to the next, nor one launch like another.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from potluck.bench.pipeline import (
    AddedHop,
    Growth,
    HopFigures,
    PipelineBenchSettings,
    connected,
    hop_figures,
    own_ms,
    speed_of,
)
from potluck.net.loop import run
from potluck.orchestrator.generation import StepTiming
from potluck.testing.local_swarm import LocalSwarm, split_plan

_PROMPT = (1, 2, 3, 4)


class Launch(msgspec.Struct, frozen=True):
    """Every token of one launch."""

    timings: list[StepTiming]
    tokens_per_s: list[float]

    @property
    def own_ms(self) -> float:
        """Everything but computing, in a token's whole round."""
        return statistics.median(own_ms(timing) for timing in self.timings)


def bench_growth(settings: PipelineBenchSettings, say: Callable[[str], None]) -> Growth:
    launches: dict[int, list[Launch]] = {shards: [] for shards in settings.shard_counts}
    for number in range(settings.growth_launches):
        for shards, done in launches.items():
            say(f"{shards} shards, launch {number + 1} of {settings.growth_launches}")
            with LocalSwarm(settings.model, split_plan(settings.layer_count, shards, 0)) as swarm:
                done.append(run(_measure(settings, swarm)))
    hops = tuple(_figures(shards, done) for shards, done in launches.items())
    return Growth(hops, tuple(added_hop(a, b, launches[a], launches[b]) for a, b in itertools.pairwise(launches)))


async def _measure(settings: PipelineBenchSettings, swarm: LocalSwarm) -> Launch:
    launch = Launch([], [])
    async with connected(swarm, settings.model) as head:
        await head.tokens(_PROMPT, settings.decode_tokens)
        for _ in range(settings.rounds):
            times, steps = await head.tokens(_PROMPT, settings.decode_tokens)
            launch.timings.extend(steps[1:])
            launch.tokens_per_s.append(speed_of(times))
    return launch


def _figures(shards: int, launches: Sequence[Launch]) -> HopFigures:
    timings = [timing for launch in launches for timing in launch.timings]
    speeds = [speed for launch in launches for speed in launch.tokens_per_s]
    return hop_figures(timings, shards, statistics.median(speeds))


def added_hop(few: int, many: int, with_few: Sequence[Launch], with_many: Sequence[Launch]) -> AddedHop:
    costs = [(b.own_ms - a.own_ms) / (many - few) for a, b in zip(with_few, with_many, strict=True)]
    error = statistics.stdev(costs) / math.sqrt(len(costs)) if len(costs) > 1 else math.inf
    return AddedHop(few, many, statistics.fmean(costs), error)
