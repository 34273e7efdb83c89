"""Plans against brute force on small random swarms; 2,000 of them here, ten times as many with POTLUCK_LONG=1."""

import math
import os
import random

import msgspec
import pytest

from potluck.core.errors import BadRequest, PlacementImpossible
from potluck.core.layers import LayerRange
from potluck.planner.arrangement import Objective, Swarm
from potluck.planner.chains import exact_chain, search_chain
from potluck.planner.costs import Link, Links, ModelCosts, NodeOffer
from potluck.planner.cover import check_tiling
from potluck.planner.placement import KEEP_WITHIN, Plan, plan
from potluck.wire.messages import Stage
from tests.unit.planner.brute_force import (
    best_by_brute_force,
    fewest_missing_bytes,
    latency_s,
    needed_bytes,
    node_id,
    random_links,
    random_model,
    random_offers,
    slowest_s,
)

SCALE = 10 if os.environ.get("POTLUCK_LONG") else 1
BATCH = 100


def drawn(seed: int, **limits: int) -> tuple[ModelCosts, list[NodeOffer], Links, Objective]:
    draw = random.Random(seed)
    model = random_model(draw)
    offers = random_offers(draw, model, **limits)
    return model, offers, random_links(draw, [offer.node for offer in offers]), draw.choice(["latency", "throughput"])


def check_limits(made: Plan, model: ModelCosts, offers: list[NodeOffer]) -> None:
    """Pins, caps, trust and memory, for everything that anybody is told to hold; the chain lies within."""
    by_node = {offer.node: offer for offer in offers}
    assert [each.node for each in made.assignments] == sorted(by_node)
    for each in made.assignments:
        offer, stage = by_node[each.node], each.stage
        assert each.reason
        if stage is None:
            continue
        assert offer.is_trusted
        assert stage.has_embedding == (stage.start == 0)
        assert stage.has_output == (stage.stop == model.layer_count)
        assert offer.pinned is None or offer.pinned == LayerRange(stage.start, stage.stop)
        assert offer.max_layers is None or stage.stop - stage.start <= offer.max_layers
        assert needed_bytes(model, offer, stage.start, stage.stop) <= offer.budget_bytes
    assert check_tiling([each.stage for each in made.chain], model.layer_count) is None
    for each in made.chain:
        held = made.stage_of(each.node)
        assert held is not None
        assert held.start <= each.stage.start
        assert each.stage.stop <= held.stop
    assert len({each.node for each in made.chain}) == len(made.chain)


def with_current(offers: list[NodeOffer], made: Plan) -> list[NodeOffer]:
    return [msgspec.structs.replace(offer, current=made.stage_of(offer.node)) for offer in offers]


@pytest.mark.parametrize("batch", range(20 * SCALE))
def test_plans_are_within_five_percent_of_brute_force_and_refusals_are_right(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        model, offers, links, objective = drawn(seed)
        best = best_by_brute_force(model, offers, links, objective)
        if best == math.inf:
            with pytest.raises(PlacementImpossible) as refused:
                plan(model, offers, links, objective)
            missing = fewest_missing_bytes(model, offers)
            assert refused.value.missing_bytes == missing > 0, seed
            assert f"({missing} bytes)" in str(refused.value), seed
            continue
        made = plan(model, offers, links, objective)
        check_limits(made, model, offers)
        by_node = {offer.node: offer for offer in offers}
        chain = [(by_node[each.node], each.stage.start, each.stage.stop) for each in made.chain]
        assert made.token_s == pytest.approx(latency_s(model, links, chain)), seed
        assert made.slowest_s == pytest.approx(slowest_s(model, links, chain)), seed
        assert (made.token_s if objective == "latency" else made.slowest_s) <= best * (1 + KEEP_WITHIN) + 1e-12, seed


@pytest.mark.parametrize("batch", range(2 * SCALE))
def test_without_anything_held_plans_are_optimal(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        model, offers, links, objective = drawn(seed)
        offers = [msgspec.structs.replace(offer, current=None) for offer in offers]
        best = best_by_brute_force(model, offers, links, objective)
        if best < math.inf:
            made = plan(model, offers, links, objective)
            assert (made.token_s if objective == "latency" else made.slowest_s) == pytest.approx(best), seed


@pytest.mark.parametrize("batch", range(2 * SCALE))
def test_a_plan_that_was_followed_is_the_next_plan_too(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        model, offers, links, objective = drawn(seed, most_nodes=6)
        try:
            made = plan(model, offers, links, objective)
        except PlacementImpossible:
            continue
        again = plan(model, with_current(offers, made), links, objective)
        assert again.placement == made.placement, seed
        assert again.chain == made.chain, seed
        assert again.load_bytes == 0, seed


@pytest.mark.parametrize("batch", range(1 * SCALE))
def test_the_order_in_which_offers_and_links_come_does_not_matter(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        model, offers, links, objective = drawn(seed, most_nodes=6)
        draw = random.Random(seed)
        pairs = list(links.pairs.items())
        shuffled = Links(links.default, dict(draw.sample(pairs, len(pairs))), links.entry)
        outcomes = []
        for order, wires in ((offers, links), (draw.sample(offers, len(offers)), shuffled)):
            try:
                outcomes.append(msgspec.json.encode(plan(model, order, wires, objective)))
            except PlacementImpossible as refused:
                outcomes.append(str(refused).encode())
        assert outcomes[0] == outcomes[1], seed


@pytest.mark.parametrize("batch", range(2 * SCALE))
def test_no_layer_gets_a_third_holder_while_an_idle_node_could_have_been_its_second(batch: int) -> None:
    """Of nodes that are free to hold anything: none is left idle that has room, and none holds only crowded layers."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        draw = random.Random(seed)
        model = random_model(draw)
        offers = [msgspec.structs.replace(o, current=None) for o in random_offers(draw, model, 6, is_free=True)]
        try:
            made = plan(model, offers)
        except PlacementImpossible:
            continue
        held = {each.node: each.stage for each in made.assignments if each.stage is not None}
        counts = [sum(s.start <= layer < s.stop for s in held.values()) for layer in range(model.layer_count)]
        assert min(counts) >= 1, seed
        in_chain = {each.node for each in made.chain}
        for offer in offers:
            stage = held.get(offer.node)
            fitting = [
                (lo, hi)
                for lo in range(model.layer_count)
                for hi in range(lo + 1, model.layer_count + 1)
                if needed_bytes(model, offer, lo, hi) <= offer.budget_bytes
            ]
            assert (stage is not None) == bool(fitting), seed
            if stage is None or offer.node in in_chain or min(counts[stage.start : stage.stop]) < 3:
                continue
            assert not any(counts[layer] < 2 for lo, hi in fitting for layer in range(lo, hi)), seed


# ---------------------------------------------------------------- one rule at a time

MB = 1 << 20


def model_of(layers: int = 16, **changes: object) -> ModelCosts:
    facts = {
        "model": "even", "weights_sha256": "0" * 64, "layer_bytes": (100 * MB,) * layers, "embedding_bytes": 50 * MB,
        "output_bytes": 50 * MB, "kv_bytes_per_token": 1024, "context_tokens": 1024, "streams": 2, "activation_bytes": 4096,
    }  # fmt: skip
    return ModelCosts(**{**facts, **changes})  # type: ignore[arg-type]


def offer(number: int, megabytes: int, **changes: object) -> NodeOffer:
    facts = {"node": node_id(number), "free_bytes": megabytes * MB, "layer_s": 0.002, "max_streams": 2}
    return NodeOffer(**{**facts, **changes})  # type: ignore[arg-type]


def held(made: Plan) -> dict[int, tuple[int, int]]:
    return {node[1]: (stage.start, stage.stop) for node, stage in made.placement}


def chain_of(made: Plan) -> list[tuple[int, int, int]]:
    return [(each.node[1], each.stage.start, each.stage.stop) for each in made.chain]


def reason(made: Plan, number: int) -> str:
    return next(each.reason for each in made.assignments if each.node == node_id(number))


def test_one_machine_with_room_serves_alone_and_the_others_stand_by() -> None:
    made = plan(model_of(), [offer(1, 4000), offer(2, 4000, layer_s=0.003), offer(3, 900, layer_s=0.003)])
    assert chain_of(made) == [(1, 0, 16)]
    assert held(made) == {1: (0, 16), 2: (0, 16), 3: (0, 8)}
    assert "serves alone" in reason(made, 1)
    assert reason(made, 2) == "stands by with layers 0-15"
    assert made.tokens_per_s == pytest.approx(1 / 0.032)


def test_throughput_splits_where_latency_would_not() -> None:
    made = plan(model_of(), [offer(1, 4000), offer(2, 4000)], objective="throughput")
    assert [stop - start for _, start, stop in chain_of(made)] == [8, 8]
    assert held(made) == {1: (0, 16), 2: (0, 16)}  # memory is left: each could take over from the other
    assert made.slowest_s == pytest.approx(0.016)
    assert made.throughput_per_s > made.tokens_per_s


def test_a_pinned_node_holds_its_range_and_nothing_else() -> None:
    pinned = LayerRange(4, 6)
    made = plan(model_of(), [offer(1, 4000, pinned=pinned), offer(2, 4000, layer_s=0.9)])
    assert held(made) == {1: (4, 6), 2: (0, 16)}
    assert "pinned" in reason(made, 1)
    tight = plan(model_of(), [offer(1, 100, pinned=pinned), offer(2, 4000)])
    assert held(tight) == {2: (0, 16)}
    assert "bytes of memory are missing" in reason(tight, 1)
    past = plan(model_of(), [offer(1, 4000, pinned=LayerRange(4, 20)), offer(2, 4000)])
    assert "has layers 0-15" in reason(past, 1)


def test_a_cap_on_layers_holds_for_replicas_too() -> None:
    made = plan(model_of(), [offer(1, 4000), offer(2, 4000, max_layers=3), offer(3, 4000, max_layers=0)])
    assert held(made) == {1: (0, 16), 2: (0, 3)}
    assert reason(made, 3) == "its cap is no layers"


def test_who_is_not_trusted_or_not_measured_holds_nothing() -> None:
    strange = [
        offer(2, 9000, is_trusted=False),
        *(offer(n, 9000, layer_s=s) for n, s in enumerate((0, -1, math.nan, math.inf), 3)),
    ]
    made = plan(model_of(), [offer(1, 4000), *strange])
    assert held(made) == {1: (0, 16)}
    assert reason(made, 2) == "not trusted to serve"
    assert all(reason(made, number) == "its speed has not been measured" for number in range(3, 7))


def test_links_that_cannot_be_are_not_used() -> None:
    offers = [offer(number, 700) for number in (1, 2, 3)]
    for broken in (Link(math.nan), Link(-1.0), Link(0.001, 0.0), Link(0.001, math.nan)):
        links = Links(Link(), {(node_id(a), node_id(b)): broken for a, b in ((1, 2), (2, 1))})
        entry = msgspec.structs.replace(links, entry=node_id(9))
        numbers = [number for number, _, _ in chain_of(plan(model_of(layers=18), offers, entry))]
        assert numbers in ([1, 3, 2], [2, 3, 1])


def test_the_output_tensor_is_paid_once_where_it_is_the_embedding() -> None:
    tied, apart = model_of(is_output_tied=True), model_of()
    enough = tied.total_bytes + 16 * tied.kv_bytes(2)
    assert apart.total_bytes == tied.total_bytes + 50 * MB
    assert held(plan(tied, [offer(1, 0, free_bytes=enough)])) == {1: (0, 16)}
    with pytest.raises(PlacementImpossible) as refused:
        plan(apart, [offer(1, 0, free_bytes=enough)])
    assert refused.value.missing_bytes == 50 * MB


def test_memory_counts_what_is_held_and_leaves_the_reserve() -> None:
    one = offer(1, 1000, held_bytes=900 * MB, reserve_bytes=100 * MB)
    assert one.budget_bytes == 1800 * MB
    assert offer(1, 50, reserve_bytes=100 * MB).budget_bytes == 0
    assert held(plan(model_of(), [one])) == {1: (0, 16)}


def test_refusals_name_what_is_in_the_way() -> None:
    def refused(*offers: NodeOffer, **limits: int) -> PlacementImpossible:
        with pytest.raises(PlacementImpossible) as caught:
            plan(model_of(), offers, **limits)  # type: ignore[arg-type]
        return caught.value

    assert refused(offer(1, 500)).constraints == ("memory",)
    assert "no node offers any" in str(refused())
    assert refused().missing_bytes == model_of().total_bytes + 16 * model_of().kv_bytes(2)
    assert refused(offer(1, 4000, is_trusted=False)).constraints == ("trust", "memory")
    assert "none of the 1 nodes is trusted" in str(refused(offer(1, 4000, is_trusted=False)))
    assert refused(offer(1, 4000, max_layers=4)).constraints == ("layer caps", "memory")
    assert refused(offer(1, 4000, pinned=LayerRange(0, 4))).constraints == ("pins", "memory")
    small = [offer(number, 700) for number in range(1, 5)]
    assert refused(*small, max_stages=2).constraints == ("shard limit", "memory")
    assert plan(model_of(), small, max_stages=3).chain


def test_two_offers_of_one_node_and_a_model_without_layers_are_mistakes() -> None:
    with pytest.raises(BadRequest):
        plan(model_of(), [offer(1, 4000), offer(1, 4000)])
    with pytest.raises(BadRequest):
        plan(model_of(layers=0), [offer(1, 4000)])


# ---------------------------------------------------------------- coming and going


def stage(start: int, stop: int) -> Stage:
    return Stage(start, stop, start == 0, stop == 16)


def test_what_is_held_stays_where_it_is_nearly_as_good() -> None:
    now = [offer(1, 1100, current=stage(0, 8)), offer(2, 1100, current=stage(8, 16)), offer(3, 1100, layer_s=0.00197)]
    made = plan(model_of(), now)
    assert (held(made)[1], held(made)[2]) == ((0, 8), (8, 16))
    assert [each.load_bytes for each in made.assignments][:2] == [0, 0]
    assert "keeps what it has" in reason(made, 1)


def test_a_much_faster_newcomer_takes_over_and_the_others_stay_as_they_are() -> None:
    now = [offer(1, 1100, current=stage(0, 8)), offer(2, 1100, current=stage(8, 16)), offer(3, 4000, layer_s=0.0005)]
    made = plan(model_of(), now)
    assert chain_of(made) == [(3, 0, 16)]
    assert held(made) == {1: (0, 8), 2: (8, 16), 3: (0, 16)}


def test_when_the_only_holder_dies_a_survivor_with_room_loads_its_layers_and_nobody_else_moves() -> None:
    left = [offer(1, 900, current=stage(0, 8)), offer(3, 900, current=stage(0, 8))]
    made = plan(model_of(), left)
    assert sorted(held(made).values()) == [(0, 8), (8, 16)]
    assert made.load_bytes == 850 * MB


def test_a_newcomer_takes_the_layers_with_the_fewest_holders() -> None:
    now = [
        offer(1, 1100, current=stage(0, 8)),
        offer(2, 1100, current=stage(8, 16)),
        offer(3, 1100, current=stage(0, 8)),
    ]
    assert held(plan(model_of(), [*now, offer(4, 500)]))[4] in {(12, 16), (8, 12)}


def test_a_crowded_replica_moves_to_where_only_one_is_left() -> None:
    now = [offer(number, 900, current=stage(0, 8)) for number in (1, 2, 3)] + [offer(4, 900, current=stage(8, 16))]
    made = plan(model_of(), now)
    assert sorted(held(made).values()) == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert plan(model_of(), with_current(now, made)).placement == made.placement


# ---------------------------------------------------------------- many nodes


def search_against_exact(seed: int) -> float | None:
    """How many times the optimum the search costs on a swarm of at most eight nodes; None where nothing fits."""
    draw = random.Random(seed)
    model = random_model(draw, 12)
    offers = [msgspec.structs.replace(o, current=None) for o in random_offers(draw, model, 8)]
    links = random_links(draw, [each.node for each in offers])
    objective: Objective = draw.choice(["latency", "throughput"])
    swarm = Swarm.of(model, offers, links, objective, draw.choice([4, 16]))
    problem = swarm.problem(swarm.free_windows())
    exact = exact_chain(problem) if problem is not None else None
    if problem is None or exact is None:
        return None
    found = search_chain(problem)
    assert found is not None, seed
    assert len(found.parts) <= swarm.max_stages, seed
    return found.cost / exact.cost


def test_the_search_for_many_nodes_comes_close_to_the_exact_answer_on_eight() -> None:
    ratios = [ratio for seed in range(30 * SCALE) if (ratio := search_against_exact(seed)) is not None]
    assert len(ratios) >= 10
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratios) / len(ratios) <= 1.01
    assert sum(ratio > 1.05 for ratio in ratios) <= 0.03 * len(ratios)


@pytest.mark.parametrize(
    ("count", "objective"), [(40, "latency"), (40, "throughput"), (1000, "latency"), (1000, "throughput")]
)
def test_large_swarms_get_valid_and_stable_plans(count: int, objective: Objective) -> None:
    draw = random.Random(count)
    model = model_of(80, streams=4)
    offers = [
        offer(number, draw.randint(200, 2500), node=number.to_bytes(32, "big"), layer_s=draw.uniform(0.001, 0.006))
        for number in range(count)
    ]
    pairs = {
        (draw.choice(offers).node, draw.choice(offers).node): Link(draw.uniform(0.0002, 0.02)) for _ in range(8 * count)
    }
    links = Links(Link(0.002), pairs)
    made = plan(model, offers, links, objective)
    check_limits(made, model, offers)
    assert len(made.chain) <= 16
    again = plan(model, with_current(offers, made), links, objective)
    assert again.placement == made.placement
    assert again.load_bytes == 0
