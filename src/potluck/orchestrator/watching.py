"""A generation as the page and `potluck top` see it while it runs: how far it is, and where its time goes. No content."""

from typing import NamedTuple

from potluck.orchestrator.request import StepTiming
from potluck.planner.cover import Placed

_NEWEST = 0.2  # weight of the newest step in a mean


class StageTiming(NamedTuple):
    """Means per token; `wire_ms` is the way to this stage from the one before."""

    compute_ms: float
    queue_ms: float
    wire_ms: float


class Watched(NamedTuple):
    id: str
    model: str
    phase: str  # queued, prefill, decode, recovering
    tokens: int
    tokens_per_s: float
    failovers: int
    stages: tuple[Placed, ...]
    stage_timings: tuple[StageTiming, ...]
    standbys: tuple[tuple[Placed, ...], ...] = ()  # for each stage, who would take it over now; empty: nobody


class StageTimings:
    """Running means of each stage's times. They begin anew when the number of stages changes."""

    def __init__(self) -> None:
        self._means: list[list[float]] = []

    def note(self, timing: StepTiming) -> None:
        wire_s = timing.total_s
        for compute_s, queue_s in timing.stages:
            wire_s -= compute_s + queue_s
        wire_s = max(0.0, wire_s) / max(1, len(timing.stages))
        if len(timing.stages) != len(self._means):
            self._means = [[compute_s, queue_s, wire_s] for compute_s, queue_s in timing.stages]
            return
        for mean, (compute_s, queue_s) in zip(self._means, timing.stages, strict=True):
            mean[0] += _NEWEST * (compute_s - mean[0])
            mean[1] += _NEWEST * (queue_s - mean[1])
            mean[2] += _NEWEST * (wire_s - mean[2])

    def shown(self) -> tuple[StageTiming, ...]:
        return tuple(StageTiming(*(round(seconds * 1000, 3) for seconds in mean)) for mean in self._means)
