"""Chains over the nodes of one swarm: which nodes may take part, which of very many are worth a look, and what a chain costs. Pure."""

import functools
import heapq
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
from potluck.planner.tables import Allowed, Costs, ModelTables, link_tables

Objective = Literal["latency", "throughput"]
Kind = Literal["latency", "throughput", "memory"]
StageCosts = Callable[[int, Costs, Allowed], Costs]  # node, its seconds, what it may take → what counts
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

    @functools.cached_property
    def exclusions(self) -> tuple[str | None, ...]:
        """Why a node takes no part, whatever the others do; None where it may."""
        return tuple(self._exclusion(offer) for offer in self.offers)

    def _exclusion(self, offer: NodeOffer) -> str | None:
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
            None if self.exclusions[index] is not None else every if offer.pinned is None else offer.pinned
            for index, offer in enumerate(self.offers)
        ]

    # ------------------------------------------------------------ chains

    def best(self, windows: Windows) -> Chain | None:
        """The best chain by the swarm's objective in which each node takes part of its window."""
        return self._solve(windows, self.objective, _seconds)

    def problem(self, windows: Windows) -> ChainProblem | None:
        """What `best` solves; None where no node may take part."""
        pool = self._pool(windows, self.objective, [])
        return self._problem(pool, windows, self.objective, _seconds) if pool else None

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
        kind: Kind,
        costs: StageCosts,
        slowest_hop: float = np.inf,
        known: Chain | None = None,
    ) -> Chain | None:
        pool = self._pool(windows, kind, [part.index for part in known.parts] if known is not None else [])
        if not pool:
            return None
        problem = self._problem(pool, windows, kind, costs, slowest_hop)
        seeds = [] if len(pool) <= EXACT_NODES else self._orders(pool, windows, known)
        found = best_chain(problem, seeds, is_brief=known is not None)
        if found is None:
            return None
        return Chain(found.cost, tuple(Part(pool[part.index], part.start, part.stop) for part in found.parts))

    def _problem(
        self,
        pool: Sequence[int],
        windows: Windows,
        kind: Kind,
        costs: StageCosts,
        slowest_hop: float = np.inf,
    ) -> ChainProblem:
        stages = np.stack([self._stage_costs(index, windows[index], costs) for index in pool])
        links = link_tables(self.links, [self.offers[index].node for index in pool], self.tables.model.activation_bytes)
        nothing = np.zeros(len(pool))
        if kind == "latency":
            hops = np.where(links.busy <= slowest_hop, links.hops, np.inf)
            return ChainProblem(stages, hops, links.entry, links.leave, self.max_stages, links.back)
        hops = links.busy if kind == "throughput" else np.zeros_like(links.busy)
        return ChainProblem(stages, hops, nothing, nothing, self.max_stages, None, kind == "throughput")

    def _stage_costs(self, index: int, window: LayerRange | None, costs: StageCosts) -> Costs:
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

    def _pool(self, windows: Windows, kind: Kind, known: Sequence[int]) -> list[int]:
        """All nodes where they are few; otherwise those that could matter: fast, roomy, both, holders of each place, known ones."""
        usable = [index for index, window in enumerate(windows) if window is not None]
        if len(usable) <= EXACT_NODES:
            return usable
        if kind != "memory":
            usable = [index for index in usable if self._rooms[index] > 0]
        chosen = set(known).union(index for index in self._notable if windows[index] is not None)
        count = self.tables.layer_count
        bounded = [(index, windows[index]) for index in usable if windows[index] != LayerRange(0, count)]
        for layer in sorted({place * (count - 1) // (_PLACES - 1) for place in range(_PLACES)}):
            holders = [index for index, window in bounded if window is not None and window.start <= layer < window.stop]
            chosen.update(heapq.nsmallest(_HOLDERS_OF_A_PLACE, holders, key=self._per_layer_s))
        return sorted(chosen)

    @functools.cached_property
    def _notable(self) -> frozenset[int]:
        """Nodes that are among the best by some measure, whatever they hold: so a plan that was followed has the same to choose from."""
        able = [index for index, why in enumerate(self.exclusions) if why is None and self._rooms[index] > 0]
        most = max(_BY_EACH_MEASURE, min(self.max_stages, len(able)))
        measures: list[Callable[[int], float]] = [
            lambda index: self.offers[index].layer_s,
            lambda index: -self._rooms[index],
            self._per_layer_s,
        ]
        return frozenset(index for measure in measures for index in heapq.nsmallest(most, able, key=measure))

    def _per_layer_s(self, index: int) -> float:
        """With its share of a hop, where the node takes all that it has room for."""
        hop_s = self.links.default.hop_s(self.tables.model.activation_bytes)
        return self.offers[index].layer_s + hop_s / max(self._rooms[index], 0.5)

    @functools.cached_property
    def _rooms(self) -> list[float]:
        """About how many layers each node could hold; 0 where not one."""
        model = self.tables.model
        layer_bytes = sum(model.layer_bytes) / model.layer_count
        rooms = []
        for offer in self.offers:
            most = float(model.layer_count if offer.max_layers is None else offer.max_layers)
            if offer.pinned is not None:
                most = float(len(offer.pinned))
            else:
                most = min(most, offer.budget_bytes / max(1.0, layer_bytes + model.kv_bytes(offer.max_streams)))
            rooms.append(most if most >= 1 or self._fits_some(offer) else 0.0)
        return rooms

    def _fits_some(self, offer: NodeOffer) -> bool:
        return bool(self.tables.fits(offer).any())

    def _orders(self, pool: Sequence[int], windows: Windows, known: Chain | None) -> list[list[int]]:
        """By the middle of what each may hold, then: fast first, roomy first, as in a chain that is known."""
        places = range(len(pool))

        def middle(place: int) -> int:
            window = windows[pool[place]]
            return window.start + window.stop if window is not None else 0

        orders = [
            sorted(places, key=lambda place: (middle(place), self.offers[pool[place]].layer_s)),
            sorted(places, key=lambda place: (middle(place), -self._rooms[pool[place]])),
            sorted(places, key=lambda place: (middle(place), self._rooms[pool[place]])),
        ]
        if known is not None:
            chain = [pool.index(part.index) for part in known.parts]
            orders.insert(0, [*chain, *(place for place in places if place not in set(chain))])
        return orders


def _seconds(_: int, seconds: Costs, allowed: Allowed) -> Costs:
    return np.where(allowed, seconds, np.inf)
