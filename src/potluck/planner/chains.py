"""The cheapest chain of nodes over all layers: exact over all subsets where nodes are few, a search over orders where they are many.

Knows costs as arrays only; what they mean (seconds, bytes that are missing, bytes to move) is the caller's. Pure and deterministic.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]

EXACT_NODES = 8  # that many always; a few more where the last step does not depend on the first node
_EXACT_SETS = EXACT_NODES * EXACT_NODES << (EXACT_NODES - 1)
_BRIEF_ORDERS, _LEAST_ORDERS, _MOST_ORDERS = 6, 24, 300  # that a search tries, by what one costs
_EFFORT, _PER_NODE = 12_000_000, 8_000  # in additions; a node costs some calls besides
_FIRST_CUT, _LATER_CUT, _LEAST_CUT = 0.5, 0.04, 0.005  # by how much a bar on the slowest stage is lowered at a time
_SMALL_CUBE = 1 << 15  # numbers that stay in the cache


@dataclass(frozen=True)
class Part:
    """Node `index` takes layers start ≤ layer < stop."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chain:
    cost: float
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ChainProblem:
    """`stages[j, start, stop]` is what node j costs with that range (infinite where it may not), `hops[i, j]` the step from i to j.

    `entry[j]` and `leave[j]` are the steps into the first and out of the last stage; with `back` the last step is `back[last, first]`
    instead. Costs add up, or with `is_bottleneck` the largest counts.
    """

    stages: Costs
    hops: Costs
    entry: Costs
    leave: Costs
    max_stages: int
    back: Costs | None = None
    is_bottleneck: bool = False

    @property
    def combine(self) -> np.ufunc:
        return np.maximum if self.is_bottleneck else np.add

    @property
    def node_count(self) -> int:
        return int(self.stages.shape[0])

    @property
    def layer_count(self) -> int:
        return int(self.stages.shape[1]) - 1

    @functools.cached_property
    def reach(self) -> npt.NDArray[np.int64]:
        """[node, start] → one past the last stop that the node can reach from there."""
        stops = np.arange(1, self.layer_count + 2)
        reach: npt.NDArray[np.int64] = np.where(np.isfinite(self.stages), stops, 0).max(axis=2)
        return reach

    @functools.cached_property
    def _reaches(self) -> dict[float, npt.NDArray[np.int64]]:
        return {}

    def reach_below(self, bar: float) -> npt.NDArray[np.int64]:
        """[node, start] → how far the node gets from there with no more than this; what is allowed there has no holes."""
        if bar not in self._reaches:
            is_below = (self.stages <= bar) & np.isfinite(self.stages)
            self._reaches[bar] = np.arange(self.layer_count + 1) + is_below.sum(axis=2)
        return self._reaches[bar]

    @property
    def has_uniform_way_out(self) -> bool:
        """Whether the last step costs the same wherever a chain of several nodes began."""
        if self.back is None or self.node_count == 1:
            return True
        between = self.back[~np.eye(self.node_count, dtype=bool)]
        return bool(between.min() == between.max())

    def cost(self, parts: Sequence[Part]) -> float:
        total = float(self.entry[parts[0].index])
        for place, part in enumerate(parts):
            if place > 0:
                total = float(self.combine(total, self.hops[parts[place - 1].index, part.index]))
            total = float(self.combine(total, self.stages[part.index, part.start, part.stop]))
        return float(self.combine(total, self.way_out(parts[0].index)[parts[-1].index]))

    def way_out(self, first: int) -> Costs:
        return self.leave if self.back is None else self.back[:, first]


def best_chain(problem: ChainProblem, seeds: Sequence[Sequence[int]] = (), is_brief: bool = False) -> Chain | None:
    """None where no chain was found. `seeds` are orders of nodes worth trying where an exact answer would take too long; `is_brief`: they
    hold a good one already, look round it only."""
    if problem.node_count == 0:
        return None
    firsts = 1 if problem.has_uniform_way_out else problem.node_count
    if problem.node_count * firsts << (problem.node_count - 1) <= _EXACT_SETS:
        return exact_chain(problem)
    return search_chain(problem, seeds, is_brief)


# ---------------------------------------------------------------- few nodes: every subset


def exact_chain(problem: ChainProblem) -> Chain | None:
    """The last step of a ring depends on the first node: a ring of unlike links is solved once for each first node."""
    nodes = range(problem.node_count)
    if problem.back is None:
        return _exact_open(problem, nodes, problem.leave)
    if problem.has_uniform_way_out:
        return _exact_open(problem, nodes, np.full(len(nodes), problem.back.max()))
    best: Chain | None = None
    for first in nodes:
        best = _better(best, _exact_open(problem, (first,), problem.way_out(first)))
    return best


def _exact_open(problem: ChainProblem, firsts: Sequence[int], way_out: Costs) -> Chain | None:
    table = _subset_table(problem, firsts)
    sizes = np.array([mask.bit_count() for mask in range(table.shape[0])])
    ends = problem.combine(table[:, :, -1], way_out[None, :])
    if problem.back is not None:  # a node alone sends to itself
        alone = np.flatnonzero(sizes == 1)
        ends[alone] = table[alone, :, -1]
    by_size = np.argsort(sizes, kind="stable")
    place = int(np.argmin(ends[by_size]))
    mask, last = int(by_size[place // ends.shape[1]]), place % ends.shape[1]
    if not np.isfinite(ends[mask, last]):
        return None
    parts = _read_back(problem, table, mask, last)
    return Chain(problem.cost(parts), parts)


def _subset_table(problem: ChainProblem, firsts: Sequence[int]) -> Costs:
    """[set of nodes, last node, layers covered] → the least cost."""
    count, layers, combine = problem.node_count, problem.layer_count, problem.combine
    table = np.full((1 << count, count, layers + 1), np.inf)
    for first in firsts:
        table[1 << first, first] = combine(problem.entry[first], problem.stages[first, 0])
    masks = np.arange(1 << count)
    sizes = np.array([int(mask).bit_count() for mask in masks])
    for size in range(1, min(count, problem.max_stages)):
        of_size = masks[sizes == size]
        for node in range(count):
            without = of_size[(of_size >> node) & 1 == 0]
            reached = combine(table[without], problem.hops[None, :, node, None]).min(axis=1)  # [set, layers]
            table[without | (1 << node), node] = _one_stage_on(problem, node, reached)
    return table


def _one_stage_on(problem: ChainProblem, node: int, reached: Costs) -> Costs:
    """From [case, layers covered] the least costs with one more stage on `node`."""
    stages = problem.stages[node]
    if len(reached) == 1:
        longer: Costs = problem.combine(reached[0, :, None], stages).min(axis=0, keepdims=True)
        return longer
    longer = np.full_like(reached, np.inf)
    ends = problem.reach[node]
    for start in np.flatnonzero(
        np.isfinite(reached).any(axis=0)
    ):  # row by row: the whole cube would not stay in the cache
        after = slice(start + 1, ends[start])
        np.minimum(
            longer[:, after], problem.combine(reached[:, start, None], stages[start, after]), out=longer[:, after]
        )
    return longer


def _read_back(problem: ChainProblem, table: Costs, mask: int, last: int) -> tuple[Part, ...]:
    """The same sums in the same order give the same bits, so equality finds the way back."""
    parts: list[Part] = []
    stop = problem.layer_count
    while mask.bit_count() > 1:
        before = mask & ~(1 << last)
        reached = problem.combine(table[before], problem.hops[:, last, None])  # [last before, layers]
        total = problem.combine(reached.min(axis=0), problem.stages[last, :, stop])
        start = int(np.argmin(total))
        parts.append(Part(last, start, stop))
        mask, last, stop = before, int(np.argmin(reached[:, start])), start
    parts.append(Part(last, 0, stop))
    return tuple(reversed(parts))


# ---------------------------------------------------------------- many nodes: orders, each solved exactly


def search_chain(problem: ChainProblem, seeds: Sequence[Sequence[int]] = (), is_brief: bool = False) -> Chain | None:
    """Each order is solved exactly. Of the orders drawn one third keep the best chain as a subsequence, so that other nodes find their
    place in it; one third have one of its nodes elsewhere; one third owe it nothing."""
    improve = _in_order_under if problem.is_bottleneck and problem.node_count > problem.max_stages else _in_order
    best: Chain | None = None
    for order in seeds:
        best = improve(problem, order, best)
    for turn, shuffled in enumerate(_shuffles(problem.node_count, _BRIEF_ORDERS if is_brief else _orders(problem))):
        if best is None or turn % 3 == 2:
            best = improve(problem, shuffled, best)
        else:
            kept = [part.index for part in best.parts]
            best = improve(problem, _around(kept if turn % 3 == 0 else _moved(kept, shuffled), shuffled), best)
    return best


def _orders(problem: ChainProblem) -> int:
    per_order: int = problem.node_count * ((problem.layer_count + 1) ** 2 + _PER_NODE)
    return min(_MOST_ORDERS, max(_LEAST_ORDERS, _EFFORT // per_order))


def _better(best: Chain | None, found: Chain | None) -> Chain | None:
    return found if found is not None and (best is None or found.cost < best.cost) else best


def _shuffles(count: int, rounds: int) -> Iterator[list[int]]:
    """The same on every node: a fixed multiplicative generator, no state of the machine."""
    state = 0x2545F491
    for _ in range(rounds):
        keys = []
        for _ in range(count):
            state = (state * 48271) % 0x7FFFFFFF
            keys.append(state)
        yield sorted(range(count), key=keys.__getitem__)


def _around(chain: Sequence[int], shuffled: Sequence[int]) -> list[int]:
    """`shuffled`, with the chain's nodes put into the chain's order at the places that they have there."""
    in_chain, members = iter(chain), set(chain)
    return [next(in_chain) if node in members else node for node in shuffled]


def _moved(chain: Sequence[int], shuffled: Sequence[int]) -> list[int]:
    """The chain with one node elsewhere; `shuffled` decides which and where."""
    ranks = [node for node in shuffled if node in set(chain)]
    rest = [node for node in chain if node != ranks[0]]
    rest.insert(shuffled[0] % len(chain), ranks[0])
    return rest


def _in_order(problem: ChainProblem, order: Sequence[int], best: Chain | None) -> Chain | None:
    """The best chain that visits nodes in this order, skipping any; stages are counted only where there are too many."""
    way_out = problem.leave if best is None else problem.way_out(best.parts[0].index)
    parts = _ordered(problem, order, None, way_out)
    if parts is not None and len(parts) > problem.max_stages:
        parts = _ordered(problem, order, problem.max_stages, way_out)
    return _better(best, None if parts is None else Chain(problem.cost(parts), parts))


def _in_order_under(problem: ChainProblem, order: Sequence[int], best: Chain | None) -> Chain | None:
    """For bottlenecks: looks for a chain below a bar, and lowers the bar while there is one."""
    cut = _FIRST_CUT if best is None else _LATER_CUT
    best = best or _furthest(problem, order, np.inf)
    while best is not None and cut >= _LEAST_CUT:
        found = _furthest(problem, order, best.cost * (1 - cut))
        best, cut = (found, cut) if found is not None else (best, cut / 4)
    return best


def _furthest(problem: ChainProblem, order: Sequence[int], bar: float) -> Chain | None:
    """A chain in this order with no cost above the bar. Whoever may take a range may take any part of it, so of each number of
    stages and last node only the furthest reach matters."""
    is_below = (problem.stages <= bar) & np.isfinite(problem.stages)
    reach = np.arange(problem.layer_count + 1) + is_below.sum(
        axis=2
    )  # [node, start]: what is allowed there has no holes
    is_open = (problem.hops <= bar)[np.ix_(order, order)]
    covered = np.zeros((problem.max_stages, len(order)), np.int64)  # [stages, place]; 0: not possible
    for place, node in enumerate(order):
        covered[0, place] = reach[node, 0]
        if place > 0 and problem.max_stages > 1:
            before = np.where(is_open[:place, place], covered[:-1, :place], 0).max(axis=1)
            covered[1:, place] = np.where((before > 0) & (reach[node, before] > before), reach[node, before], 0)
    done = np.argwhere(covered == problem.layer_count)
    if len(done) == 0:
        return None
    parts = _read_furthest(order, covered, is_open, int(done[0][0]), int(done[0][1]))
    return Chain(problem.cost(parts), parts)


def _read_furthest(
    order: Sequence[int], covered: npt.NDArray[np.int64], is_open: npt.NDArray[np.bool_], row: int, place: int
) -> tuple[Part, ...]:
    parts: list[Part] = []
    while row > 0:
        before = np.where(is_open[:place, place], covered[row - 1, :place], 0)
        parts.append(Part(order[place], int(before.max()), int(covered[row, place])))
        row, place = row - 1, int(np.argmax(before))
    parts.append(Part(order[place], 0, int(covered[0, place])))
    return tuple(reversed(parts))


def _ordered(problem: ChainProblem, order: Sequence[int], limit: int | None, way_out: Costs) -> tuple[Part, ...] | None:
    """Dynamic program over [stages so far, place in the order, layers covered]; without a limit stages are not counted."""
    table = _ordered_table(problem, order, limit)
    ends = problem.combine(table[:, :, -1], way_out[list(order)][None, :])
    row, place = (int(at) for at in np.unravel_index(int(np.argmin(ends)), ends.shape))
    if not np.isfinite(ends[row, place]):
        return None
    parts: list[Part] = []
    stop = problem.layer_count
    while True:
        node = order[place]
        value = table[row, place, stop]
        if (row == 0 or limit is None) and problem.combine(problem.entry[node], problem.stages[node, 0, stop]) == value:
            parts.append(Part(node, 0, stop))
            return tuple(reversed(parts))
        row = row if limit is None else row - 1
        hops = problem.hops[list(order[:place]), node]
        reached = problem.combine(table[row, :place], hops[:, None])  # [place before, layers]
        start = int(np.argmin(problem.combine(reached.min(axis=0), problem.stages[node, :, stop])))
        parts.append(Part(node, start, stop))
        place, stop = int(np.argmin(reached[:, start])), start


def _ordered_table(problem: ChainProblem, order: Sequence[int], limit: int | None) -> Costs:
    combine, rows = problem.combine, 1 if limit is None else limit
    table = np.full((rows, len(order), problem.layer_count + 1), np.inf)
    for place, node in enumerate(order):
        here = table[:, place]
        here[0] = combine(problem.entry[node], problem.stages[node, 0])
        if place == 0:
            continue
        hops = problem.hops[list(order[:place]), node]
        reached = combine(table[:, :place], hops[None, :, None]).min(axis=1)  # [stages, layers]
        longer = _one_stage_on(problem, node, reached)
        if limit is None:
            np.minimum(here, longer, out=here)
        elif rows > 1:
            here[1:] = longer[:-1]
    return table
