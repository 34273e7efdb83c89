"""The shortest path over shards: per-layer times, hops, queues, and where to go over from one holder to the next. Pure.

Embedding, layers and output are places in a row; each place has a holder; staying with a holder costs no hop.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.core.limits import MAX_SHARDS_PER_REQUEST
from potluck.planner.costs import Links
from potluck.planner.cover import Candidate, Placed, step_share_us
from potluck.wire.messages import Stage

Seconds = npt.NDArray[np.float64]

# Where nothing was measured.
LAN_HOP_S, WAN_HOP_S = 0.0005, 0.03
LAYER_S = 0.002
# Charged for each layer and end, beyond any real time: spares are used where nobody else is left.
_SPARE_S = 1_000.0
_MOST_QUEUE_S = 1e9
_MOST_WITH_LINKS = 96  # candidates between which each single link is looked at


class RouteRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may use. `own` is the node that asks: not the first stage unless allowed, so that others do the work."""

    max_shards: int = MAX_SHARDS_PER_REQUEST
    own: bytes | None = None
    allows_own_first: bool = False
    excluded: frozenset[bytes] = frozenset()
    links: Links | None = None  # measured between shards; without them each candidate's own hop counts
    activation_bytes: int = 0


# ---------------------------------------------------------------- what a candidate costs

# One shard more, beside its layers and the way there: a message taken in, a batch, a message sent (docs/hop.md). A measured round trip has
# none of it, and without it an embedding alone on a near node would look free.
SHARD_S = 0.0005


def _layer_s(candidate: Candidate) -> float:
    if candidate.layer_s is not None:
        return candidate.layer_s
    layers = candidate.stage.stop - candidate.stage.start
    return candidate.step_us / 1e6 / layers if candidate.step_us > 0 and layers > 0 else LAYER_S


def _hop_s(candidate: Candidate) -> float:
    if candidate.hop_s is not None:
        return candidate.hop_s
    return LAN_HOP_S if candidate.is_local else WAN_HOP_S


def _queue_s(candidate: Candidate) -> float:
    """What is queued there goes first, each a step over all that it holds."""
    layers = max(1, candidate.stage.stop - candidate.stage.start)
    return min(candidate.queue_depth * _layer_s(candidate) * layers, _MOST_QUEUE_S)


def entry_s(candidate: Candidate, before: bytes | None, rules: RouteRules) -> float:
    source = before if before is not None else rules.own
    if rules.links is None or source is None:
        return _hop_s(candidate) + _queue_s(candidate)
    return rules.links.hop_s(source, candidate.node, rules.activation_bytes) + SHARD_S + _queue_s(candidate)


def leave_s(candidate: Candidate, after: bytes | None, rules: RouteRules) -> float:
    target = after if after is not None else rules.own
    if rules.links is None or target is None:
        return _hop_s(candidate)
    return rules.links.hop_s(candidate.node, target, rules.activation_bytes if after is not None else 0)


def work_s(candidate: Candidate, stage: Stage) -> float:
    layers = stage.stop - stage.start
    places = layers + stage.has_embedding + stage.has_output
    spare = _SPARE_S * places if candidate.is_spare else 0.0
    return layers * _layer_s(candidate) + spare + (candidate.output_s if stage.has_output else 0.0)


def holds(held: Stage, part: Stage) -> bool:
    has_ends = (held.has_embedding or not part.has_embedding) and (held.has_output or not part.has_output)
    return held.start <= part.start and part.stop <= held.stop and has_ends


# ---------------------------------------------------------------- the shortest path


@dataclass(frozen=True)
class _Field:
    """Candidates as arrays. Places run over the embedding (where wanted), the layers, the output (where wanted)."""

    usable: list[Candidate]
    first: npt.NDArray[np.int64]  # place
    stop: npt.NDArray[np.int64]
    embedding: Seconds
    work: Seconds  # of a layer
    output: Seconds
    entry: Seconds  # from whoever comes before, links aside
    start: Seconds  # from `before`, infinite where it may not begin
    leave: Seconds
    hops: Seconds | None  # [from, to], with links
    is_barred: npt.NDArray[np.bool_]  # from the first layer too, so that an embedding elsewhere is no way round it


class Prepared:
    """Candidates that a request may use, in the order that breaks ties, with their costs as arrays: made once, asked for several ranges."""

    def __init__(self, candidates: Sequence[Candidate], rules: RouteRules) -> None:
        usable = [each for each in candidates if not each.is_full and each.node not in rules.excluded]
        usable.sort(key=lambda each: (not each.is_local, each.node, each.stage.start, each.stage.stop))
        self.usable, self.rules = usable, rules
        stages = [
            (each.stage.start, each.stage.stop, each.stage.has_embedding, each.stage.has_output) for each in usable
        ]
        self.starts, self.stops, self.embeddings, self.outputs = np.array(stages, np.int64).reshape(-1, 4).T
        self.spare = np.array([_SPARE_S if each.is_spare else 0.0 for each in usable])
        self.layer = np.array([_layer_s(each) for each in usable])
        self.output = np.array([each.output_s for each in usable])
        self.hop = np.array([_hop_s(each) for each in usable])
        self.entry = self.hop + np.array([_queue_s(each) for each in usable])

    def without(self, node: bytes) -> npt.NDArray[np.bool_]:
        return np.array([each.node != node for each in self.usable], np.bool_)

    def spans(self, wanted: Stage, places: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The places that each can serve; none where first ≥ stop. Layer l is place l - wanted.start, one later after an embedding."""
        shift = int(wanted.has_embedding) - wanted.start
        low, high = np.maximum(self.starts, wanted.start), np.minimum(self.stops, wanted.stop)
        first, stop = low + shift, high + shift
        if wanted.has_embedding:
            first = np.where((self.embeddings > 0) & (low == wanted.start), 0, first)
        if wanted.has_output:
            stop = np.where((self.outputs > 0) & (high == wanted.stop), places, stop)
        return first, np.where(high < low, first, stop)


def shortest_path(
    prepared: Prepared,
    wanted: Stage,
    before: bytes | None,
    after: bytes | None,
    max_shards: int,
    among: npt.NDArray[np.bool_] | None = None,
    is_spare_equal: bool = False,
) -> list[Placed] | None:
    """The quickest stages for `wanted` between the nodes `before` and `after` (None: the head); only candidates `among` those marked."""
    places = wanted.stop - wanted.start + wanted.has_embedding + wanted.has_output
    if places == 0:
        return []
    field = _field(prepared, wanted, before, after, places, among, is_spare_equal) if max_shards >= 1 else None
    if field is None or not field.usable:
        return None
    path = _path(field, wanted, places, None)
    if path is not None and _shards(path) > max_shards:
        path = _path(field, wanted, places, max_shards)
    return None if path is None else _placed(field, wanted, path)


def _field(
    prepared: Prepared,
    wanted: Stage,
    before: bytes | None,
    after: bytes | None,
    places: int,
    among: npt.NDArray[np.bool_] | None,
    is_spare_equal: bool,
) -> _Field:
    rules = prepared.rules
    first, stop = prepared.spans(wanted, places)
    is_used = first < stop if among is None else (first < stop) & among
    kept = np.flatnonzero(is_used)
    if rules.links is not None and len(kept) > _MOST_WITH_LINKS:
        kept = _nearest(prepared, kept, wanted)
    usable = [prepared.usable[index] for index in kept]
    spare = np.zeros(len(kept)) if is_spare_equal else prepared.spare[kept]
    is_barred = np.array([_may_not_begin(each, wanted, rules, before) for each in usable], np.bool_)
    entry, hop, has_links = prepared.entry[kept], prepared.hop[kept], rules.links is not None
    start = np.array([entry_s(each, before, rules) for each in usable]) if has_links else entry
    return _Field(
        usable,
        first[kept],
        stop[kept],
        spare,
        prepared.layer[kept] + spare,
        prepared.output[kept] + spare,
        entry,
        np.where(is_barred, np.inf, start),
        np.array([leave_s(each, after, rules) for each in usable]) if has_links else hop,
        _between_shards(usable, rules),
        is_barred,
    )


def _may_not_begin(candidate: Candidate, wanted: Stage, rules: RouteRules, before: bytes | None) -> bool:
    return before is None and wanted.has_embedding and candidate.node == rules.own and not rules.allows_own_first


def _nearest(prepared: Prepared, kept: npt.NDArray[np.int64], wanted: Stage) -> npt.NDArray[np.int64]:
    """With measured links every pair counts, so very many holders are thinned out: the best few of each layer stay."""
    usable = prepared.usable
    cost = prepared.spare + prepared.layer + prepared.entry - prepared.hop
    share = max(2, _MOST_WITH_LINKS // max(1, wanted.stop - wanted.start))
    taken = np.zeros(wanted.stop + 2, np.int64)
    chosen = []
    for index in kept[np.argsort(cost[kept], kind="stable")]:
        stage = usable[index].stage
        layers = taken[max(stage.start, wanted.start) : min(stage.stop, wanted.stop) + 1]
        if (layers < share).any():
            chosen.append(index)
            layers += 1
    return np.array(sorted(chosen), np.int64)


def _between_shards(usable: Sequence[Candidate], rules: RouteRules) -> Seconds | None:
    links = rules.links
    if links is None:
        return None
    queues = [_queue_s(each) for each in usable]
    rows = [
        [
            links.hop_s(a.node, b.node, rules.activation_bytes) + SHARD_S + queue
            for b, queue in zip(usable, queues, strict=True)
        ]
        for a in usable
    ]
    return np.array(rows).reshape(len(usable), len(usable))


def _path(field: _Field, wanted: Stage, places: int, limit: int | None) -> list[int] | None:
    """The candidate of each place; rows count shards where there is a limit."""
    rows, count = 1 if limit is None else limit, len(field.usable)
    best = np.full((rows, count), np.inf)
    best[0] = np.where(field.first == 0, field.start + _place_s(field, wanted, 0, places), np.inf)
    came_from = np.full((places, rows, count), -1, np.int64)
    for place in range(1, places):
        stay = np.where(field.stop > place, best, np.inf)
        change, sources = _changes(field, best, limit)
        change[:, (field.first > place) | (field.stop <= place)] = np.inf
        if wanted.has_embedding and place == 1:
            change[:, field.is_barred] = np.inf
        is_change = change < stay
        came_from[place] = np.where(is_change, sources, -1)
        best = np.where(is_change, change, stay) + _place_s(field, wanted, place, places)
    ends = best + field.leave
    row, last = (int(at) for at in np.unravel_index(int(np.argmin(ends)), ends.shape))
    if not np.isfinite(ends[row, last]):
        return None
    return _walk_back(came_from, row, last, limit is not None)


def _changes(field: _Field, best: Seconds, limit: int | None) -> tuple[Seconds, npt.NDArray[np.int64]]:
    """For each candidate the least time to get there from another, and from whom."""
    if limit is not None:
        best = np.concatenate((np.full((1, best.shape[1]), np.inf), best[:-1]))
    if field.hops is None:
        sources = np.argmin(best, axis=1)
        least = np.take_along_axis(best, sources[:, None], axis=1)
        return least + field.entry, np.broadcast_to(sources[:, None], best.shape)
    through = best[:, :, None] + field.hops[None]
    sources = np.argmin(through, axis=1)
    return np.take_along_axis(through, sources[:, None, :], axis=1)[:, 0], sources


def _place_s(field: _Field, wanted: Stage, place: int, places: int) -> Seconds:
    if wanted.has_embedding and place == 0:
        return field.embedding
    return field.output if wanted.has_output and place == places - 1 else field.work


def _walk_back(came_from: npt.NDArray[np.int64], row: int, last: int, is_counted: bool) -> list[int]:
    path = [last]
    for place in range(len(came_from) - 1, 0, -1):
        source = int(came_from[place, row, path[-1]])
        if source >= 0:
            row = row - 1 if is_counted else row
        path.append(source if source >= 0 else path[-1])
    return path[::-1]


def _shards(path: Sequence[int]) -> int:
    return 1 + sum(a != b for a, b in itertools.pairwise(path))


def _placed(field: _Field, wanted: Stage, path: Sequence[int]) -> list[Placed]:
    placed, place = [], 0
    shift = int(wanted.has_embedding) - wanted.start
    for index, run in itertools.groupby(path):
        stop = place + len(list(run))
        stage = Stage(
            min(max(place - shift, wanted.start), wanted.stop),
            min(max(stop - shift, wanted.start), wanted.stop),
            wanted.has_embedding and place == 0,
            wanted.has_output and stop == len(path),
        )
        candidate = field.usable[index]
        share_us = step_share_us(candidate, stage)
        placed.append(Placed(candidate.node, candidate.address, stage, share_us, candidate.arithmetic))
        place = stop
    return placed
