"""Plans against brute force on small random swarms; 2,000 of them here, ten times as many with POTLUCK_LONG=1."""

import math
import os
import random

import msgspec
import pytest

from potluck.core.errors import BadRequest, PlacementImpossible
from potluck.core.layers import LayerRange
from potluck.planner.costs import Link, Links, ModelCosts, NodeOffer
from potluck.planner.cover import check_tiling
from potluck.planner.placement import KEEP_WITHIN, Objective, Plan, plan
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
        try:
            made = plan(model, offers, links, objective)
        except PlacementImpossible as refused:
            assert best == math.inf, seed
            assert refused.missing_bytes == fewest_missing_bytes(model, offers), seed
            assert refused.missing_bytes > 0, seed
            assert str(refused.missing_bytes) in str(refused), seed
            continue
        check_limits(made, model, offers)
        by_node = {offer.node: offer for offer in offers}
        chain = [(by_node[each.node], each.stage.start, each.stage.stop) for each in made.chain]
        assert made.token_s == pytest.approx(latency_s(model, links, chain)), seed
        assert made.slowest_s == pytest.approx(slowest_s(model, links, chain)), seed
        assert (made.token_s if objective == "latency" else made.slowest_s) <= best * (1 + KEEP_WITHIN) + 1e-12, seed


@pytest.mark.parametrize("batch", range(3 * SCALE))
def test_without_anything_held_plans_are_optimal(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        model, offers, links, objective = drawn(seed)
        offers = [msgspec.structs.replace(offer, current=None) for offer in offers]
        best = best_by_brute_force(model, offers, links, objective)
        if best < math.inf:
            made = plan(model, offers, links, objective)
            assert (made.token_s if objective == "latency" else made.slowest_s) == pytest.approx(best), seed


@pytest.mark.parametrize("batch", range(3 * SCALE))
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
