"""Second holders: what nodes hold beyond the chain, so that every layer has two holders before any gets a third. Pure."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from potluck.core.layers import LayerRange
from potluck.planner.arrangement import Swarm

Counts = npt.NDArray[np.int64]
Holdings = dict[int, LayerRange]  # by node's place in the swarm

_ENOUGH = 2  # holders of a layer, for the sake of which nodes that hold something already are moved


def add_replicas(swarm: Swarm, holdings: Mapping[int, LayerRange], in_chain: frozenset[int]) -> Holdings:
    """`holdings` and what idle nodes take; where layers have one holder only, replicas that are not needed move, others grow."""
    held = dict(holdings)
    counts = holders_per_layer(swarm, held)
    idle = [index for index in range(len(swarm.offers)) if index not in held and swarm.exclusions[index] is None]
    for index in sorted(idle, key=lambda index: -swarm.tables.budget(swarm.offers[index])):
        window = _scarcest(swarm, index, counts)
        if window is not None:
            held[index] = window
            counts[window.start : window.stop] += 1
    while counts.min() < _ENOUGH and (_move_one(swarm, held, counts, in_chain) or _grow_one(swarm, held, counts)):
        pass
    return held


def holders_per_layer(swarm: Swarm, holdings: Mapping[int, LayerRange]) -> Counts:
    counts = np.zeros(swarm.tables.layer_count, np.int64)
    for window in holdings.values():
        counts[window.start : window.stop] += 1
    return counts


def _scarcest(swarm: Swarm, index: int, counts: Counts, around: LayerRange | None = None) -> LayerRange | None:
    """Of the largest ranges that this node can hold the one with the most layers of the fewest holders. A pin decides instead."""
    offer, tables = swarm.offers[index], swarm.tables
    if offer.pinned is not None:
        return offer.pinned if around is None else None
    lengths = tables.fits(offer).sum(axis=1)  # what fits from a start on has no holes: longer only needs more
    reach = np.arange(tables.layer_count + 1) + lengths
    starts = np.flatnonzero(lengths)
    if around is not None:
        starts = starts[(starts <= around.start) & (reach[starts] >= around.stop)]
    if len(starts) == 0:
        return None
    stops = reach[starts]
    scarce = np.concatenate(([0], np.cumsum(counts == counts.min())))
    held = np.concatenate(([0], np.cumsum(counts)))
    gained, crowd = scarce[stops] - scarce[starts], (held[stops] - held[starts]) / (stops - starts)
    best = int(np.lexsort((starts, -(stops - starts), crowd, -gained))[0])
    return LayerRange(int(starts[best]), int(stops[best]))


def _served(counts: Counts) -> int:
    """What moving and growing must raise, so that both end and a second plan finds nothing left to do."""
    return int(np.minimum(counts, _ENOUGH).sum())


def _move_one(swarm: Swarm, held: Holdings, counts: Counts, in_chain: frozenset[int]) -> bool:
    for index in sorted(held):
        if index in in_chain or swarm.offers[index].pinned is not None:
            continue
        old = held[index]
        without = counts.copy()
        without[old.start : old.stop] -= 1
        window = _scarcest(swarm, index, without)
        if window is not None and _take(held, counts, index, without, window):
            return True
    return False


def _grow_one(swarm: Swarm, held: Holdings, counts: Counts) -> bool:
    for index in sorted(held):
        old = held[index]
        without = counts.copy()
        without[old.start : old.stop] -= 1
        window = _scarcest(swarm, index, counts, around=old)
        if window is not None and _take(held, counts, index, without, window):
            return True
    return False


def _take(held: Holdings, counts: Counts, index: int, without: Counts, window: LayerRange) -> bool:
    after = without.copy()
    after[window.start : window.stop] += 1
    if _served(after) <= _served(counts) or after.min() < counts.min():
        return False
    held[index] = window
    counts[:] = after
    return True
