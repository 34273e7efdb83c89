"""Chains over the nodes of one swarm: which nodes may take part, which of very many are worth a look, and what a chain costs. Pure."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck.core.errors import BadRequest
from potluck.core.layers import LayerRange
from potluck.planner.chains import EXACT_NODES, Chain, ChainProblem, Part, best_chain
from potluck.planner.costs import Links, ModelCosts, NodeOffer
from potluck.planner.tables import Allowed, Costs, LinkTables, ModelTables, link_tables

Objective = Literal["latency", "throughput"]
Windows = Sequence[LayerRange | None]  # by node: the layers of which it may take any part; None: none

_BY_EACH_MEASURE = 12  # nodes that come into the pool for being fast, roomy, or fast and roomy
_PLACES = 16  # layers, evenly spaced, of which the pool has holders in any case
_HOLDERS_OF_A_PLACE = 2


@dataclass(frozen=True)
class Swarm:
    """A model, the nodes in the order of their ids, and what counts."""

    tables: ModelTables
    offers: tuple[NodeOffer, ...]
    links: Links
    objective: Objective
    max_stages: int

    @classmethod
    def of(
        cls, model: ModelCosts, offers: Iterable[NodeOffer], links: Links, objective: Objective, max_stages: int
    ) -> "Swarm":
        ordered = tuple(sorted(offers, key=lambda offer: offer.node))
        if len({offer.node for offer in ordered}) != len(ordered):
            raise BadRequest("two offers come from the same node")
        if model.layer_count == 0:
            raise BadRequest(f"{model.model} has no layers")
        return cls(ModelTables(model), ordered, links, objective, max_stages)

    def exclusion(self, index: int) -> str | None:
        """Why this node takes no part, whatever its memory; None where it may."""
        offer = self.offers[index]
        if not offer.is_trusted:
            return "not trusted to serve"
        speeds = (offer.layer_s, offer.embedding_s, offer.output_s)
        if not (all(math.isfinite(each) and each >= 0 for each in speeds) and offer.layer_s > 0):
            return "its speed has not been measured"
        return self.tables.pin_problem(offer)

    def free_windows(self) -> list[LayerRange | None]:
        """Every layer to every node that may take part, to pinned ones their range."""
        every = LayerRange(0, self.tables.layer_count)
        return [
            None if self.exclusion(index) is not None else every if offer.pinned is None else offer.pinned
            for index, offer in enumerate(self.offers)
        ]

    # ------------------------------------------------------------ chains

    def best(self, windows: Windows) -> Chain | None:
        """The best chain by the swarm's objective in which each node takes part of its window."""
        return self._solve(windows, self.objective, lambda index, seconds, allowed: np.where(allowed, seconds, np.inf))

    def least_moved(self, windows: Windows, best: Chain, tolerance: float) -> Chain:
        """Of the chains that are nearly as good as `best` the one that loads least: a loaded byte is charged in seconds such that loading
        the whole model costs as much as the tolerance gives. Of equally good ones the quickest for one session."""
        if tolerance == 0 and self.objective == "latency":
            return best
        model = self.tables.model
        latency = self.latency_s(best.parts)
        most_bytes = model.total_bytes + model.output_bytes
        charge = tolerance * latency / max(1, most_bytes)
        slowest = best.cost * (1 + tolerance) if self.objective == "throughput" else np.inf

        def costs(index: int, seconds: Costs, allowed: Allowed) -> Costs:
            loaded = charge * self.tables.to_load(self.offers[index])
            return np.where(allowed & (seconds <= slowest), seconds + loaded, np.inf)

        found = self._solve(windows, "latency", costs, slowest_hop=slowest, known=best)
        if found is None or self.cost(found.parts) > best.cost * (1 + tolerance):
            return best
        return Chain(self.cost(found.parts), found.parts)

    def least_missing(self, windows: Windows) -> Chain | None:
        """The chain for which the fewest bytes of memory are missing; its cost is their number."""

        def costs(index: int, _: Costs, __: Allowed) -> Costs:
            offer, need = self.offers[index], self.tables.need(self.offers[index])
            if offer.pinned is not None:  # all of it is held, whatever part a chain uses
                need = np.full_like(need, need[offer.pinned.start, offer.pinned.stop])
            missing = np.maximum(0, need - self.tables.budget(offer))
            return np.where(self.tables.under_cap(offer), missing.astype(np.float64), np.inf)

        return self._solve(windows, "memory", costs)

    def _solve(
        self,
        windows: Windows,
        kind: Literal["latency", "throughput", "memory"],
        costs: Callable[[int, Costs, Allowed], Costs],
        slowest_hop: float = np.inf,
        known: Chain | None = None,
    ) -> Chain | None:
        pool = self._pool(windows, kind, [part.index for part in known.parts] if known is not None else [])
        if not pool:
            return None
        stages = np.stack([self._stage_costs(index, windows[index], costs) for index in pool])
        links = link_tables(self.links, [self.offers[index].node for index in pool], self.tables.model.activation_bytes)
        problem = _problem(stages, links, kind, self.max_stages, slowest_hop)
        seeds = [] if len(pool) <= EXACT_NODES else self._orders(pool, windows, known)
        found = best_chain(problem, seeds)
        if found is None:
            return None
        return Chain(found.cost, tuple(Part(pool[part.index], part.start, part.stop) for part in found.parts))

    def _stage_costs(
        self, index: int, window: LayerRange | None, costs: Callable[[int, Costs, Allowed], Costs]
    ) -> Costs:
        offer = self.offers[index]
        inside = self.tables.inside(window)
        own = costs(index, self.tables.seconds(offer), inside & self.tables.fits(offer))
        return np.where(inside, own, np.inf)

    # ------------------------------------------------------------ what a chain costs

    def cost(self, parts: Sequence[Part]) -> float:
        return self.latency_s(parts) if self.objective == "latency" else self.slowest_s(parts)

    def stage_s(self, part: Part) -> float:
        return float(self.tables.seconds(self.offers[part.index])[part.start, part.stop])

    def latency_s(self, parts: Sequence[Part]) -> float:
        """One token all the way round."""
        nodes = [self.offers[part.index].node for part in parts]
        payload = self.tables.model.activation_bytes
        hops = sum(self.links.hop_s(a, b, payload) for a, b in itertools.pairwise(nodes))
        entry = self.links.entry
        if entry is None:
            ends = self.links.hop_s(nodes[-1], nodes[0], 0)
        else:
            ends = self.links.hop_s(entry, nodes[0], 0) + self.links.hop_s(nodes[-1], entry, 0)
        return sum(self.stage_s(part) for part in parts) + hops + ends

    def slowest_s(self, parts: Sequence[Part]) -> float:
        """The stage or link that holds up the others when many sessions run."""
        nodes = [self.offers[part.index].node for part in parts]
        payload = self.tables.model.activation_bytes
        links = [self.links.busy_s(a, b, payload) for a, b in itertools.pairwise(nodes)]
        return max([*links, *(self.stage_s(part) for part in parts)])

    # ------------------------------------------------------------ many nodes

    def _pool(self, windows: Windows, kind: str, known: Sequence[int]) -> list[int]:
        """All nodes where they are few; otherwise those that could matter: fast, roomy, both, holders of each place, known ones."""
        usable = [index for index, window in enumerate(windows) if window is not None]
        if len(usable) <= EXACT_NODES:
            return usable
        sizes = self._capacities(usable, windows)
        if kind != "memory":
            usable = [index for index in usable if sizes[index] > 0]
        hop_s = self.links.default.hop_s(self.tables.model.activation_bytes)
        per_layer = {i: self.offers[i].layer_s + hop_s / max(sizes[i], 0.5) for i in usable}
        measures: list[Callable[[int], float]] = [
            lambda i: self.offers[i].layer_s,
            lambda i: -sizes[i],
            lambda i: per_layer[i],
        ]
        chosen = set(known)
        most = max(_BY_EACH_MEASURE, min(self.max_stages, len(usable)))
        for measure in measures:
            chosen.update(sorted(usable, key=measure)[:most])  # stable, and in the order of ids before
        count = self.tables.layer_count
        bounded = [i for i in usable if windows[i] != LayerRange(0, count)]
        for layer in sorted({place * (count - 1) // (_PLACES - 1) for place in range(_PLACES)}):
            holders = [i for i in bounded if layer in (windows[i] or ())]
            chosen.update(sorted(holders, key=per_layer.__getitem__)[:_HOLDERS_OF_A_PLACE])
        return sorted(chosen)

    def _capacities(self, usable: Sequence[int], windows: Windows) -> dict[int, float]:
        """About how many layers each could hold."""
        model = self.tables.model
        layer_bytes = sum(model.layer_bytes) / model.layer_count
        sizes = {}
        for index in usable:
            offer, window = self.offers[index], windows[index]
            most = float(len(window)) if window is not None else 0.0
            if offer.pinned is None:
                most = min(most, model.layer_count if offer.max_layers is None else offer.max_layers)
                each = layer_bytes + model.kv_bytes(offer.max_streams)
                most = min(most, offer.budget_bytes / max(1.0, each))
            sizes[index] = most if most >= 1 else 0.0
        return sizes

    def _orders(self, pool: Sequence[int], windows: Windows, known: Chain | None) -> list[list[int]]:
        """By the middle of what each may hold, then: fast first, roomy first, as in a chain that is known."""
        sizes = self._capacities(pool, windows)
        places = range(len(pool))

        def middle(place: int) -> int:
            window = windows[pool[place]]
            return window.start + window.stop if window is not None else 0

        def held(place: int) -> int:
            stage = self.offers[pool[place]].current
            return stage.start + stage.stop if stage is not None else self.tables.layer_count

        orders = [
            sorted(places, key=lambda place: (middle(place), self.offers[pool[place]].layer_s)),
            sorted(places, key=lambda place: (middle(place), -sizes[pool[place]])),
            sorted(places, key=lambda place: (middle(place), sizes[pool[place]])),
            sorted(places, key=lambda place: (middle(place), held(place))),
        ]
        if known is not None:
            chain = [pool.index(part.index) for part in known.parts]
            orders.insert(0, [*chain, *(place for place in places if place not in set(chain))])
        return orders


def _problem(stages: Costs, links: LinkTables, kind: str, max_stages: int, slowest_hop: float) -> ChainProblem:
    nothing = np.zeros(len(stages))
    if kind == "latency":
        hops = np.where(links.busy <= slowest_hop, links.hops, np.inf)
        return ChainProblem(stages, hops, links.entry, links.leave, max_stages, links.back)
    hops = links.busy if kind == "throughput" else np.zeros_like(links.busy)
    return ChainProblem(stages, hops, nothing, nothing, max_stages, None, kind == "throughput")
