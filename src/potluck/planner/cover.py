"""Which shards together cover a model's layers. Pure: no I/O, no clock, no randomness."""

import itertools
from collections.abc import Sequence

import msgspec

from potluck.wire.messages import Stage


class Candidate(msgspec.Struct, frozen=True):
    """A stage that some node offers, with what was measured of it (None, and 0 in `step_us` and `max_streams`: not known).

    Ids break ties, so that every node agrees. `greedy_cover` looks at the queue and the LAN only, `route.py` at all of it.
    """

    node: bytes
    address: str
    stage: Stage
    queue_depth: int = 0
    step_us: int = 0
    is_local: bool = False  # on the same LAN, or in this process
    layer_s: float | None = None  # one token through one layer
    output_s: float = 0.0
    hop_s: float | None = None  # one way, to hand it an activation
    streams: int = 0
    max_streams: int = 0
    is_spare: bool = False  # used where others fail, not before
    arithmetic: int = 0  # see core/exactness.py; 0: whatever was asked for

    @property
    def is_full(self) -> bool:
        return 0 < self.max_streams <= self.streams


class Placed(msgspec.Struct, frozen=True):
    """One stage of a pipeline, and who runs it."""

    node: bytes
    address: str
    stage: Stage
    step_us: int = 0
    arithmetic: int = 0  # that its shard computes by; 0: the request's


def greedy_cover(candidates: Sequence[Candidate], wanted: Stage) -> list[Placed] | None:
    """From the first uncovered layer on, the shard with the shortest queue that has it (then: local, reaching furthest).

    Ranges may overlap among candidates; of each only the part that is needed is used. None where some layer has no holder.
    """
    placed: list[Placed] = []
    cursor = wanted.start
    needs_embedding = wanted.has_embedding
    while True:
        fitting = [c for c in candidates if _continues(c.stage, cursor, wanted, needs_embedding)]
        if not fitting:
            return None
        best = min(fitting, key=lambda c: _preference(c, wanted))
        stop = min(best.stage.stop, wanted.stop)
        is_last = stop == wanted.stop and (best.stage.has_output or not wanted.has_output)
        stage = Stage(cursor, stop, needs_embedding, is_last and wanted.has_output)
        placed.append(Placed(best.node, best.address, stage, step_share_us(best, stage), best.arithmetic))
        if is_last:
            return placed
        cursor, needs_embedding = stop, False


def cover_around(candidates: Sequence[Candidate], own: Sequence[Placed], layer_count: int) -> list[Placed] | None:
    """A pipeline of one's own ends of the model with others' layers between them; None where some layer has no holder."""
    prefix = next((placed for placed in own if placed.stage.has_embedding), None)
    suffix = next((placed for placed in own if placed.stage.has_output and placed is not prefix), None)
    if prefix is not None and prefix.stage.has_output:
        return [prefix]
    wanted = Stage(
        prefix.stage.stop if prefix is not None else 0,
        suffix.stage.start if suffix is not None else layer_count,
        prefix is None,
        suffix is None,
    )
    is_whole = prefix is not None and suffix is not None and wanted.start == wanted.stop
    between = [] if is_whole else greedy_cover(candidates, wanted)
    if between is None:
        return None
    return [*([prefix] if prefix is not None else []), *between, *([suffix] if suffix is not None else [])]


def _continues(stage: Stage, cursor: int, wanted: Stage, needs_embedding: bool) -> bool:
    """Whether `stage` can go on at `cursor` and brings us further."""
    if needs_embedding and not stage.has_embedding:
        return False
    if not stage.start <= cursor <= stage.stop:
        return False
    finishes = stage.stop >= wanted.stop and (stage.has_output or not wanted.has_output)
    return stage.stop > cursor or finishes or (needs_embedding and stage.stop == cursor)


def _preference(candidate: Candidate, wanted: Stage) -> tuple[int, bool, bool, int, bytes]:
    finishes = candidate.stage.has_output or not wanted.has_output
    return (candidate.queue_depth, not candidate.is_local, not finishes, -candidate.stage.stop, candidate.node)


def step_share_us(candidate: Candidate, stage: Stage) -> int:
    whole = max(1, candidate.stage.stop - candidate.stage.start)
    return candidate.step_us * (stage.stop - stage.start) // whole


def check_tiling(stages: Sequence[Stage], layer_count: int) -> str | None:
    """What is wrong with these stages as a pipeline of a whole model; None where nothing is."""
    if not stages:
        return "a pipeline needs at least one shard"
    for stage in stages:
        if stage.stop < stage.start:
            return f"layers {stage.start}-{stage.stop - 1} are not a range: the first must not be after the last"
    if stages[0].start != 0 or not stages[0].has_embedding:
        return "the first shard must begin at layer 0 and own the embedding"
    if stages[-1].stop != layer_count or not stages[-1].has_output:
        return f"the last shard must reach layer {layer_count - 1} and own the output"
    for before, after in itertools.pairwise(stages):
        if after.start > before.stop:
            return f"nobody holds layers {before.stop}-{after.start - 1}"
        if after.start < before.stop:
            return f"layers {after.start}-{before.stop - 1} are in two shards of one pipeline"
        if before.has_output or after.has_embedding:
            return "only the last shard has the output, and only the first the embedding"
    return None
