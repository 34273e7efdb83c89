"""How long placing a model and routing a request take as a swarm grows. Made-up swarms, the real planner; the clock is only here."""

import random
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from potluck.planner.arrangement import Objective
from potluck.planner.costs import Link, Links, ModelCosts, NodeOffer
from potluck.planner.cover import Candidate
from potluck.planner.placement import Plan, plan
from potluck.planner.route import RouteRules, quickest_cover, route
from potluck.wire.messages import Stage

PLAN_BAR_MS, ROUTE_BAR_MS = 500.0, 20.0  # promised for 1,000 nodes and 80 layers

_MEASURED_LINKS = 8  # per node
_LAYER_BYTES, _END_BYTES = 400 << 20, 500 << 20


class PlannerBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    node_counts: tuple[int, ...] = (10, 100, 1000)
    layer_counts: tuple[int, ...] = (32, 80)
    plan_rounds: int = 5
    route_rounds: int = 15
    seed: int = 0


class PlannerFigures(msgspec.Struct, frozen=True):
    """Medians. For `replan` what the plan asks for is in place already; `route` is the choice for one request, with `standbys` the
    stand-ins are named too."""

    nodes: int
    layers: int
    plan_latency_ms: float
    plan_throughput_ms: float
    replan_ms: float
    route_ms: float
    standbys_ms: float
    chain: int  # stages of the plan for latency
    is_met: bool


class PlannerReport(msgspec.Struct, frozen=True):
    seed: int
    rows: tuple[PlannerFigures, ...]


def bench_planner(settings: PlannerBenchSettings, say: Callable[[str], None]) -> PlannerReport:
    rows = []
    for layers in settings.layer_counts:
        for nodes in settings.node_counts:
            say(f"{nodes} nodes, {layers} layers")
            rows.append(_figures(settings, nodes, layers))
    return PlannerReport(settings.seed, tuple(rows))


def _figures(settings: PlannerBenchSettings, nodes: int, layers: int) -> PlannerFigures:
    model, offers, links = made_up_swarm(nodes, layers, settings.seed)
    made = plan(model, offers, links)
    followed = [msgspec.structs.replace(offer, current=made.stage_of(offer.node)) for offer in offers]
    candidates, rules = _candidates(made, offers, settings.seed), RouteRules()
    whole = Stage(0, layers, True, True)

    def planning(objective: Objective, of: Sequence[NodeOffer]) -> float:
        return _median_ms(lambda: plan(model, of, links, objective), settings.plan_rounds)

    latency, throughput = planning("latency", offers), planning("throughput", offers)
    again = planning("latency", followed)
    routed = _median_ms(lambda: quickest_cover(candidates, whole, rules), settings.route_rounds)
    with_standbys = _median_ms(lambda: route(candidates, (), layers, rules), settings.route_rounds)
    is_met = max(latency, throughput, again) <= PLAN_BAR_MS and max(routed, with_standbys) <= ROUTE_BAR_MS
    return PlannerFigures(
        nodes, layers, latency, throughput, again, routed, with_standbys, len(made.chain), is_met
    )  # fmt: skip


def made_up_swarm(nodes: int, layers: int, seed: int) -> tuple[ModelCosts, list[NodeOffer], Links]:
    """Unequal machines of which about five together have room for the model, each with some measured links."""
    draw = random.Random(seed)  # noqa: S311  # draws machines, not secrets
    model = ModelCosts(
        model="made-up", weights_sha256="0" * 64, layer_bytes=(_LAYER_BYTES,) * layers, embedding_bytes=_END_BYTES,
        output_bytes=_END_BYTES, kv_bytes_per_token=4096, context_tokens=4096, streams=4, activation_bytes=16384,
    )  # fmt: skip
    share = (model.total_bytes + layers * model.kv_bytes(4)) / 4
    offers = [
        NodeOffer(
            node=number.to_bytes(32, "big"), free_bytes=int(share * draw.uniform(0.3, 1.6)), reserve_bytes=256 << 20,
            layer_s=draw.uniform(0.001, 0.008), output_s=0.002, max_streams=4,
        )
        for number in range(nodes)
    ]  # fmt: skip
    names = [offer.node for offer in offers]
    pairs = {
        (name, other): Link(draw.uniform(0.0003, 0.02), draw.choice([1e7, 1e8]))
        for name in names
        for other in draw.sample(names, min(nodes, _MEASURED_LINKS))
    }
    return model, offers, Links(Link(0.004, 5e7), pairs)


def _candidates(made: Plan, offers: Sequence[NodeOffer], seed: int) -> list[Candidate]:
    """What the swarm would advertise if it had followed the plan."""
    draw = random.Random(seed)  # noqa: S311  # draws queues, not secrets
    return [
        Candidate(
            offer.node, "", stage, draw.randint(0, 2), is_local=draw.random() < 0.5, layer_s=offer.layer_s,
            output_s=offer.output_s, hop_s=draw.uniform(0.0003, 0.02), max_streams=4, streams=draw.randint(0, 4),
        )
        for offer in offers
        if (stage := made.stage_of(offer.node)) is not None
    ]  # fmt: skip


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    work()  # what is made once (imports, tables of numpy) is not the question
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)
