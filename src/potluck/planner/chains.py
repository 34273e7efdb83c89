"""The cheapest chain of nodes over all layers: exact over all subsets where nodes are few, a search over orders where they are many.

Knows costs as arrays only; what they mean (seconds, bytes that are missing, bytes to move) is the caller's. Pure and deterministic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]

EXACT_NODES = 8  # that many always; a few more where the last step does not depend on the first node
_EXACT_SETS = EXACT_NODES * EXACT_NODES << (EXACT_NODES - 1)
_ORDERS = (
    24  # of a search without a limit on stages; with one each order costs as many times more as there may be stages
)
_LIMITED_ORDERS = 5


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


def best_chain(problem: ChainProblem, seeds: Sequence[Sequence[int]] = ()) -> Chain | None:
    """None where no chain was found. `seeds` are orders of nodes worth trying where an exact answer would take too long."""
    if problem.node_count == 0:
        return None
    firsts = 1 if problem.has_uniform_way_out else problem.node_count
    if problem.node_count * firsts << (problem.node_count - 1) <= _EXACT_SETS:
        return _exact(problem)
    return _search(problem, seeds)


# ---------------------------------------------------------------- few nodes: every subset


def _exact(problem: ChainProblem) -> Chain | None:
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
            longer = combine(reached[:, :, None], problem.stages[None, node]).min(axis=1)
            table[without | (1 << node), node] = longer
    return table


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


def _search(problem: ChainProblem, seeds: Sequence[Sequence[int]]) -> Chain | None:
    """Each order is solved exactly; the next ones keep the best chain as a subsequence, so the result only gets better."""
    is_limited = problem.is_bottleneck and problem.node_count > problem.max_stages
    best: Chain | None = None
    for order in seeds:
        best = _better(best, _in_order(problem, order, is_limited, best))
    rounds = _LIMITED_ORDERS if is_limited else _ORDERS
    for shuffled in _shuffles(problem.node_count, rounds):
        order = shuffled if best is None else _around(best, shuffled)
        best = _better(best, _in_order(problem, order, is_limited, best))
    return best


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


def _around(chain: Chain, shuffled: Sequence[int]) -> list[int]:
    """`shuffled`, with the chain's nodes put into the chain's order at the places that they have there."""
    in_chain = iter([part.index for part in chain.parts])
    members = {part.index for part in chain.parts}
    return [next(in_chain) if node in members else node for node in shuffled]


def _in_order(problem: ChainProblem, order: Sequence[int], is_limited: bool, best: Chain | None) -> Chain | None:
    """The best chain that visits nodes in this order, skipping any. A limit on stages is heeded from the start, or where it is broken."""
    way_out = problem.leave if best is None else problem.way_out(best.parts[0].index)
    parts = _ordered(problem, order, problem.max_stages if is_limited else None, way_out)
    if parts is not None and len(parts) > problem.max_stages:
        parts = _ordered(problem, order, problem.max_stages, way_out)
    return None if parts is None else Chain(problem.cost(parts), parts)


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
        longer = combine(reached[:, :, None], problem.stages[node][None]).min(axis=1)
        if limit is None:
            np.minimum(here, longer, out=here)
        elif rows > 1:
            here[1:] = longer[:-1]
    return table
