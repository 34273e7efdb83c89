"""Which node should hold which layers: a chain that serves, second holders for the rest, and the reason for each. Pure.

The same inputs give the same plan on every node, whatever the order they come in. ADR 6 has the method and its limits.
"""

from collections.abc import Iterable, Mapping

import msgspec

from potluck.core.layers import LayerRange
from potluck.core.limits import MAX_SHARDS_PER_REQUEST
from potluck.planner.arrangement import Objective, Swarm
from potluck.planner.chains import Chain, Part
from potluck.planner.costs import Links, ModelCosts, NodeOffer
from potluck.planner.refusal import refusal
from potluck.planner.replicas import Holdings, add_replicas
from potluck.wire.messages import Stage

KEEP_WITHIN = 0.05  # what is held stays while it serves at most this much worse than the best there could be


class Assignment(msgspec.Struct, frozen=True):
    """What a node should hold (None: nothing), why, and how much of it must be loaded."""

    node: bytes
    stage: Stage | None
    is_replica: bool  # holds it for others to fall back on; the chain runs elsewhere
    load_bytes: int
    reason: str


class PlannedStage(msgspec.Struct, frozen=True):
    """One stage of the chain that serves: all of what its node holds, or a part."""

    node: bytes
    stage: Stage
    seconds: float


class Plan(msgspec.Struct, frozen=True):
    """`assignments` has every node that offered something, in the order of ids. Figures are for the chain; replicas come on top."""

    model: str
    weights_sha256: str
    objective: Objective
    assignments: tuple[Assignment, ...]
    chain: tuple[PlannedStage, ...]
    token_s: float  # one token all the way round
    slowest_s: float  # the slowest stage or link
    tokens_per_s: float  # of one session
    throughput_per_s: float  # of as many sessions as there is KV for

    def stage_of(self, node: bytes) -> Stage | None:
        return next((each.stage for each in self.assignments if each.node == node), None)

    @property
    def load_bytes(self) -> int:
        return sum(each.load_bytes for each in self.assignments)

    @property
    def placement(self) -> tuple[tuple[bytes, Stage], ...]:
        """Who holds what: two plans that agree in this ask for the same."""
        return tuple((each.node, each.stage) for each in self.assignments if each.stage is not None)


def plan(
    model: ModelCosts,
    offers: Iterable[NodeOffer],
    links: Links | None = None,
    objective: Objective = "latency",
    max_stages: int = MAX_SHARDS_PER_REQUEST,
    keep_within: float = KEEP_WITHIN,
) -> Plan:
    """Raises PlacementImpossible, which says how many bytes are missing and what is in the way."""
    swarm = Swarm.of(model, offers, links or Links(), objective, max_stages)
    best = swarm.best(swarm.free_windows())
    if best is None:
        raise refusal(swarm)
    held = _valid_holdings(swarm)
    chain = _through(swarm, held)
    worst = best.cost * (1 + keep_within)
    if chain is None or chain.cost > worst:
        tolerance = keep_within if any(offer.current is not None for offer in swarm.offers) else 0.0
        chain = swarm.least_moved(swarm.free_windows(), best, tolerance)
        held = _with_chain(held, chain)
    final = add_replicas(swarm, held, frozenset(part.index for part in chain.parts))
    # Replicas may serve better than the nodes that the plan began with; the next plan, which knows what is held only, sees the same.
    again = _through(swarm, final)
    return _described(swarm, final, again if again is not None and again.cost <= worst else chain)


def _through(swarm: Swarm, held: Holdings) -> Chain | None:
    """The best chain over what is held."""
    return swarm.best([held.get(index) for index in range(len(swarm.offers))])


def _valid_holdings(swarm: Swarm) -> Holdings:
    """What nodes hold now and may go on holding: pinned nodes what they are pinned to, others what fits their limits."""
    held: Holdings = {}
    for index, offer in enumerate(swarm.offers):
        stage = offer.current
        if swarm.exclusions[index] is not None:
            continue
        if offer.pinned is not None:
            held[index] = offer.pinned
        elif stage is not None and stage.start < stage.stop <= swarm.tables.layer_count:
            is_whole = stage == swarm.tables.stage(stage.start, stage.stop)
            if is_whole and swarm.tables.fits(offer)[stage.start, stage.stop]:
                held[index] = LayerRange(stage.start, stage.stop)
    return held


def _with_chain(held: Holdings, chain: Chain) -> Holdings:
    """Nodes of the chain hold their part of it, or go on holding more where they do; a pin is never changed."""
    result = dict(held)
    for part in chain.parts:
        old = result.get(part.index)
        if old is None or not (old.start <= part.start and part.stop <= old.stop):
            result[part.index] = LayerRange(part.start, part.stop)
    return result


# ---------------------------------------------------------------- figures and reasons


def _described(swarm: Swarm, held: Mapping[int, LayerRange], chain: Chain) -> Plan:
    model, parts = swarm.tables.model, chain.parts
    token_s, slowest_s = swarm.latency_s(parts), swarm.slowest_s(parts)
    streams = max(1, min(model.streams, *(swarm.offers[part.index].max_streams for part in parts)))
    return Plan(
        model.model,
        model.weights_sha256,
        swarm.objective,
        tuple(_assignment(swarm, index, held.get(index), chain, token_s) for index in range(len(swarm.offers))),
        tuple(
            PlannedStage(swarm.offers[p.index].node, swarm.tables.stage(p.start, p.stop), swarm.stage_s(p)) for p in parts
        ),
        token_s,
        slowest_s,
        1 / token_s,
        min(1 / slowest_s, streams / token_s),
    )  # fmt: skip


def _assignment(swarm: Swarm, index: int, held: LayerRange | None, chain: Chain, token_s: float) -> Assignment:
    offer, tables = swarm.offers[index], swarm.tables
    part = next((part for part in chain.parts if part.index == index), None)
    if held is None:
        return Assignment(offer.node, None, False, 0, _idle_reason(swarm, index))
    load = int(tables.to_load(offer)[held.start, held.stop])
    reason = f"stands by with layers {held}" if part is None else _serving_reason(swarm, part, held, chain, token_s)
    if offer.pinned is not None:
        reason += "; pinned there"
    elif load == 0:
        reason += "; keeps what it has"
    return Assignment(offer.node, tables.stage(held.start, held.stop), part is None, load, reason)


def _serving_reason(swarm: Swarm, part: Part, held: LayerRange, chain: Chain, token_s: float) -> str:
    own_ms, all_ms = swarm.stage_s(part) * 1000, token_s * 1000
    if len(chain.parts) == 1:
        why = (
            "has room for all, and no split is faster"
            if swarm.objective == "latency"
            else "no split has a faster stage"
        )
        return f"serves alone, {own_ms:.2f} ms per token: {why}"
    used = LayerRange(part.start, part.stop)
    standby = "" if used == held else f", stands by with {held}"
    return f"serves layers {used}, {own_ms:.2f} of {all_ms:.2f} ms per token{standby}"


def _idle_reason(swarm: Swarm, index: int) -> str:
    excluded = swarm.exclusions[index]
    if excluded is not None:
        return excluded
    offer, tables = swarm.offers[index], swarm.tables
    if offer.max_layers is not None and offer.max_layers < 1:
        return "its cap is no layers"
    smallest = int(tables.need(offer)[tables.is_range].min())
    return f"{smallest - tables.budget(offer)} bytes short of the smallest layer with its KV"
