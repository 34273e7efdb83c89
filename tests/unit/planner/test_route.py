"""Routes against every path on small cases, against greedy cover on larger ones, and HearthNet's rules."""

import itertools
import math
import os
import random
from collections.abc import Iterator

import msgspec
import pytest

from potluck.planner.costs import Link, Links
from potluck.planner.cover import Candidate, Placed, check_tiling, cover_around, greedy_cover
from potluck.planner.route import (
    RouteRules,
    between_own,
    quickest_around,
    quickest_cover,
    quickest_replacements,
    route,
    route_seconds,
    standby,
)
from potluck.planner.shortest_path import SHARD_S
from potluck.wire.messages import Stage
from tests.support.greedy_gaps import replace_gaps

SCALE = 10 if os.environ.get("POTLUCK_LONG") else 1
BATCH = 50


def node(number: int) -> bytes:
    return bytes([number]) * 32


def shard(number: int, lo: int, hi: int, layers: int = 16, **changes: object) -> Candidate:
    """Layers lo … hi, inclusive, with the ends that belong to them; on the LAN and quick unless told otherwise."""
    known = {"is_local": True, "layer_s": 0.001, "hop_s": 0.0005, **changes}
    return Candidate(node(number), f"node:{number}", Stage(lo, hi + 1, lo == 0, hi == layers - 1), **known)  # type: ignore[arg-type]


def whole(layers: int = 16) -> Stage:
    return Stage(0, layers, True, True)


def who(stages: list[Placed] | None) -> list[tuple[int, int, int]]:
    assert stages is not None
    return [(placed.node[0], placed.stage.start, placed.stage.stop - 1) for placed in stages]


def drawn(draw: random.Random, layers: int, most: int) -> list[Candidate]:
    found = []
    for number in range(draw.randint(1, most)):
        lo = draw.choice([0, draw.randrange(layers)])
        hi = draw.choice([layers - 1, draw.randint(lo, layers - 1)])
        found.append(
            shard(
                number, lo, hi, layers, queue_depth=draw.choice([0, 0, 1, 3]), is_local=draw.random() < 0.5,
                layer_s=draw.uniform(0.001, 0.01), hop_s=draw.choice([None, draw.uniform(0.0002, 0.02)]),
                output_s=draw.choice([0.0, 0.004]), streams=draw.choice([0, 0, 0, 2]), max_streams=2,
                is_spare=draw.random() < 0.15,
            )
        )  # fmt: skip
    return found


def drawn_rules(draw: random.Random, candidates: list[Candidate]) -> RouteRules:
    pairs = {
        (a.node, b.node): Link(draw.uniform(0.0002, 0.03), draw.choice([1e5, 1e8]))
        for a, b in itertools.permutations(candidates, 2)
        if draw.random() < 0.7
    }
    return RouteRules(
        max_shards=draw.choice([1, 2, 3, 16]),
        own=draw.choice([None, candidates[0].node]),
        allows_own_first=draw.random() < 0.5,
        excluded=frozenset({candidates[-1].node}) if draw.random() < 0.2 else frozenset(),
        links=draw.choice([None, Links(Link(0.002, 1e7), pairs)]),
        activation_bytes=1000,
    )


def every_route(candidates: list[Candidate], layers: int, rules: RouteRules) -> list[list[Placed]]:
    """Each way to cut the model, ends alone included, and each holder for each part: only what the rules allow."""
    usable = [c for c in candidates if not c.is_full and c.node not in rules.excluded]
    found = []
    for stages in every_cut(layers, rules.max_shards):
        holders = [[c for c in usable if holds(c.stage, stage)] for stage in stages]
        for chosen in itertools.product(*holders):
            first = next(c for c, stage in zip(chosen, stages, strict=True) if stage.stop > 0)
            is_own_first = rules.own in (chosen[0].node, first.node) and not rules.allows_own_first
            if not is_own_first and all(a.node != b.node for a, b in itertools.pairwise(chosen)):
                found.append([Placed(c.node, c.address, s) for c, s in zip(chosen, stages, strict=True)])
    return found


def every_cut(layers: int, most: int) -> Iterator[list[Stage]]:
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            for is_front, is_back in itertools.product([False, True], repeat=2):
                bounds = [*([0] if is_front else []), 0, *cuts, layers, *([layers] if is_back else [])]
                ranges = list(itertools.pairwise(bounds))
                stages = [Stage(lo, hi, i == 0, i == len(ranges) - 1) for i, (lo, hi) in enumerate(ranges)]
                if len(stages) <= most:
                    yield stages


def holds(held: Stage, part: Stage) -> bool:
    has_ends = held.has_embedding >= part.has_embedding and held.has_output >= part.has_output
    return has_ends and held.start <= part.start and part.stop <= held.stop


def plain_seconds(candidates: list[Candidate], stages: list[Placed], rules: RouteRules) -> float:
    """What the words say, once more: hops and queues on entering, layers, and the way back to the head."""
    by_node = {c.node: c for c in candidates}
    total, source = 0.0, rules.own
    for placed in stages:
        c = by_node[placed.node]
        hop = c.hop_s if c.hop_s is not None else 0.0005 if c.is_local else 0.03
        if rules.links is not None and source is not None:
            hop = rules.links.hop_s(source, c.node, rules.activation_bytes) + SHARD_S
        length = placed.stage.stop - placed.stage.start
        places = length + placed.stage.has_embedding + placed.stage.has_output
        total += hop + c.queue_depth * c.layer_s * (c.stage.stop - c.stage.start)  # type: ignore[operator]
        total += length * c.layer_s + (1000 * places if c.is_spare else 0)  # type: ignore[operator]
        total += c.output_s if placed.stage.has_output else 0
        source = c.node
    last = by_node[stages[-1].node]
    back = last.hop_s if last.hop_s is not None else 0.0005 if last.is_local else 0.03
    if rules.links is not None and rules.own is not None:
        back = rules.links.hop_s(last.node, rules.own, 0)
    return total + back


@pytest.mark.parametrize("batch", range(20 * SCALE))
def test_the_route_is_the_best_of_all(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        draw = random.Random(seed)
        layers = draw.randint(1, 5)
        candidates = drawn(draw, layers, 4)
        rules = drawn_rules(draw, candidates)
        best = min(
            (plain_seconds(candidates, r, rules) for r in every_route(candidates, layers, rules)), default=math.inf
        )
        found = quickest_cover(candidates, whole(layers), rules)
        assert (found is None) == (best == math.inf), seed
        if found is None:
            continue
        assert check_tiling([placed.stage for placed in found], layers) is None, seed
        assert route_seconds(candidates, found, rules) == pytest.approx(best), seed
        assert plain_seconds(candidates, found, rules) == pytest.approx(best), seed
        assert found == quickest_cover(draw.sample(candidates, len(candidates)), whole(layers), rules), seed


@pytest.mark.parametrize("batch", range(4 * SCALE))
def test_a_route_is_found_where_greedy_finds_one_and_is_never_worse(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        draw = random.Random(seed)
        layers = draw.randint(1, 24)
        candidates = [msgspec.structs.replace(c, streams=0) for c in drawn(draw, layers, 30)]
        greedy, found = (
            greedy_cover(candidates, whole(layers)),
            quickest_cover(candidates, whole(layers), RouteRules(max_shards=64)),
        )
        assert (greedy is None) == (found is None), seed
        if greedy is not None and found is not None:
            assert check_tiling([placed.stage for placed in found], layers) is None, seed
            assert route_seconds(candidates, found) <= route_seconds(candidates, greedy) + 1e-9, seed


@pytest.mark.parametrize("batch", range(4 * SCALE))
def test_gaps_and_ends_are_filled_wherever_greedy_can(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        draw = random.Random(seed)
        layers = draw.randint(2, 12)
        candidates = [msgspec.structs.replace(c, streams=0) for c in drawn(draw, layers, 12)]
        own = [Placed(node(200), "", Stage(0, draw.randint(0, layers // 2), True))]
        if draw.random() < 0.5:
            own.append(Placed(node(200), "", Stage(draw.randint(layers // 2, layers), layers, False, True)))
        around, greedy = (
            quickest_around(candidates, own, layers, RouteRules(max_shards=64)),
            cover_around(candidates, own, layers),
        )
        assert (around is None) == (greedy is None), seed
        pipeline = quickest_cover(candidates, whole(layers), RouteRules(max_shards=64))
        if around is not None:
            assert check_tiling([placed.stage for placed in around], layers) is None, seed
        if pipeline is None:
            continue
        kept = [placed if draw.random() < 0.6 else None for placed in pipeline]
        lost = frozenset(p.node for p, k in zip(pipeline, kept, strict=True) if k is None and draw.random() < 0.5)
        kept = [None if placed is None or placed.node in lost else placed for placed in kept]
        groups = quickest_replacements(kept, candidates, lost, layers, RouteRules(max_shards=64))
        expected = replace_gaps(kept, candidates, lost, layers)
        assert (groups is None) == (expected is None), seed
        if groups is not None and expected is not None:
            assert [bool(group) for group in groups] == [bool(group) for group in expected], seed
            assert check_tiling([placed.stage for group in groups for placed in group], layers) is None, seed
            assert all(group == [k] for group, k in zip(groups, kept, strict=True) if k is not None), seed
            assert not {p.node for g, k in zip(groups, kept, strict=True) if k is None for p in g} & lost, seed


# ---------------------------------------------------------------- the rules, one by one


def test_the_cut_between_overlapping_holders_is_where_the_faster_one_ends() -> None:
    shards = [shard(1, 0, 11, layer_s=0.004), shard(2, 4, 15, layer_s=0.001)]
    assert who(quickest_cover(shards, whole())) == [(1, 0, 3), (2, 4, 15)]
    assert who(quickest_cover([shards[0], shard(2, 4, 15, layer_s=0.009)], whole())) == [(1, 0, 11), (2, 12, 15)]


def test_a_node_may_serve_two_stages_around_a_faster_one() -> None:
    shards = [shard(1, 0, 15, layer_s=0.01), shard(2, 4, 11)]
    assert who(quickest_cover(shards, whole())) == [(1, 0, 3), (2, 4, 11), (1, 12, 15)]


def test_a_full_shard_is_skipped() -> None:
    shards = [shard(1, 0, 15, streams=4, max_streams=4), shard(2, 0, 15, layer_s=0.01, streams=3, max_streams=4)]
    assert who(quickest_cover(shards, whole())) == [(2, 0, 15)]
    assert quickest_cover(shards[:1], whole()) is None


def test_a_long_queue_is_avoided_unless_the_way_round_is_longer() -> None:
    shards = [shard(1, 0, 15, queue_depth=2), shard(2, 0, 15, layer_s=0.002)]
    assert who(quickest_cover(shards, whole())) == [(2, 0, 15)]
    assert who(quickest_cover([shards[0], shard(2, 0, 15, layer_s=0.02)], whole())) == [(1, 0, 15)]


def test_the_lan_is_preferred_where_nothing_was_measured_and_on_a_tie() -> None:
    assert who(quickest_cover([shard(1, 0, 15, is_local=False, hop_s=None), shard(2, 0, 15, hop_s=None)], whole())) == [
        (2, 0, 15)
    ]
    assert who(quickest_cover([shard(1, 0, 15, is_local=False), shard(2, 0, 15)], whole())) == [(2, 0, 15)]


def test_a_spare_is_used_only_for_what_nobody_else_has() -> None:
    shards = [shard(1, 0, 15, is_spare=True, layer_s=0.0001), shard(2, 0, 7), shard(3, 10, 15)]
    assert who(quickest_cover(shards, whole())) == [(2, 0, 7), (1, 8, 9), (3, 10, 15)]


def test_oneself_is_not_the_first_shard_unless_allowed() -> None:
    shards = [shard(1, 0, 15), shard(2, 0, 7, layer_s=0.003)]
    assert who(quickest_cover(shards, whole(), RouteRules(own=node(1)))) == [(2, 0, 0), (1, 1, 15)]
    assert who(quickest_cover(shards, whole(), RouteRules(own=node(1), allows_own_first=True))) == [(1, 0, 15)]
    assert quickest_cover(shards[:1], whole(), RouteRules(own=node(1))) is None


def test_no_more_shards_than_allowed_even_where_more_would_be_quicker() -> None:
    quick = [shard(number, 4 * number, 4 * number + 3) for number in range(4)]
    slow = [shard(8, 0, 9, layer_s=0.1), shard(9, 8, 15, layer_s=0.1)]
    assert len(quickest_cover([*quick, *slow], whole()) or []) == 4
    assert len(quickest_cover([*quick, *slow], whole(), RouteRules(max_shards=3)) or []) == 3
    assert who(quickest_cover([*quick, *slow], whole(), RouteRules(max_shards=2))) == [(8, 0, 7), (9, 8, 15)]
    assert quickest_cover([*quick, *slow], whole(), RouteRules(max_shards=1)) is None
    assert quickest_around(quick, [Placed(node(99), "", Stage(0, 0, True))], 16, RouteRules(max_shards=4)) is None


def test_an_end_alone_on_a_near_node_is_not_free() -> None:
    near = Links(Link(0.00005, 1e9))
    shards = [shard(1, 0, 15, layer_s=0.0002), shard(2, 0, 15, layer_s=0.0002, queue_depth=0)]
    for own in (1, 2, 3):
        found = quickest_cover(shards, whole(), RouteRules(links=near, own=node(own), allows_own_first=True))
        assert found is not None
        assert len(found) == 1


def test_measured_links_between_shards_decide() -> None:
    shards = [shard(1, 0, 7), shard(2, 8, 15), shard(3, 8, 15, layer_s=0.00101)]
    far = Links(Link(0.001), {(node(1), node(2)): Link(0.2)})
    assert who(quickest_cover(shards, whole(), RouteRules(links=far))) == [(1, 0, 7), (3, 8, 15)]
    assert who(quickest_cover(shards, whole())) == [(1, 0, 7), (2, 8, 15)]


def test_a_replacement_is_near_the_stages_that_stay() -> None:
    kept = [Placed(node(1), "", Stage(0, 4, True)), None, Placed(node(4), "", Stage(8, 16, False, True))]
    shards = [shard(2, 4, 7), shard(3, 4, 7)]
    far = Links(Link(0.001), {(node(2), node(4)): Link(0.2)})
    groups = quickest_replacements(kept, shards, frozenset(), 16, RouteRules(links=far))
    assert groups is not None
    assert [who(group) for group in groups] == [[(1, 0, 3)], [(3, 4, 7)], [(4, 8, 15)]]
    assert quickest_replacements(kept, shards, frozenset({node(2), node(3)}), 16) is None


def test_embedding_and_output_alone_are_stages_too() -> None:
    ends = [Candidate(node(1), "", Stage(0, 0, True)), Candidate(node(2), "", Stage(16, 16, False, True))]
    middle = Candidate(node(3), "", Stage(0, 16), 5)
    cover = quickest_cover([*ends, middle], whole())
    assert cover is not None
    assert [placed.stage for placed in cover] == [Stage(0, 0, True), Stage(0, 16), Stage(16, 16, False, True)]


def test_every_stage_has_a_stand_in_that_is_named_in_advance() -> None:
    shards = [
        shard(1, 0, 7), shard(2, 8, 15), shard(3, 0, 15, is_spare=True), shard(4, 8, 11, layer_s=0.002), shard(5, 12, 15, layer_s=0.002),
    ]  # fmt: skip
    found = route(shards, [], 16)
    assert found is not None
    assert who(list(found.stages)) == [(1, 0, 7), (2, 8, 15)]
    assert who(list(found.standbys[0])) == [(3, 0, 7)]
    assert who(list(found.standbys[1])) == [(3, 8, 15)]
    assert found.seconds == pytest.approx(0.016 + 3 * 0.0005)
    assert standby(shards[:2], found.stages[0]) == ()
    without_spare = [shards[0], shards[1], shards[3], shards[4]]
    assert who(list(standby(without_spare, found.stages[1]))) == [(4, 8, 11), (5, 12, 15)]


def test_ones_own_ends_need_no_stand_in() -> None:
    own = [Placed(node(99), "", Stage(0, 4, True), 4000)]
    found = route([shard(1, 0, 15), shard(2, 0, 15)], own, 16)
    assert found is not None
    assert who(list(found.stages)) == [(99, 0, 3), (1, 4, 15)]
    assert found.standbys[0] == ()
    assert who(list(found.standbys[1])) == [(2, 4, 15)]
    assert found.seconds == pytest.approx(0.004 + 0.0005 + 0.012 + 0.0005)


def test_the_share_of_a_measured_step_goes_with_the_part_that_is_used() -> None:
    [placed] = quickest_cover([shard(1, 0, 15, step_us=1600)], Stage(4, 8)) or []
    assert (placed.stage, placed.step_us) == (Stage(4, 8, False, False), 400)


def test_what_a_coordinator_keeps_at_home_is_not_taken_over_by_others() -> None:
    """The encrypted pipeline: a replacement may hold what lies between one's own ends, and never the ends themselves."""
    own = [Placed(node(9), "", Stage(0, 2, True)), Placed(node(9), "", Stage(14, 16, False, True))]
    offered = between_own([shard(1, 0, 15), shard(2, 0, 1), shard(3, 8, 15), shard(9, 0, 15)], own)
    assert [(c.node[0], c.stage.start, c.stage.stop - 1) for c in offered] == [
        (9, 0, 1), (9, 14, 15), (1, 2, 13), (3, 8, 13),
    ]  # fmt: skip
    assert not [c for c in offered if c.node != node(9) and (c.stage.has_embedding or c.stage.has_output)]
    middle = Placed(node(1), "", Stage(2, 14))
    kept: list[Placed | None] = [None, middle, None]
    groups = quickest_replacements(kept, offered, frozenset(), 16)
    assert groups is not None
    assert [who(group) for group in groups] == [[(9, 0, 1)], [(1, 2, 13)], [(9, 14, 15)]]
    assert quickest_replacements(kept, offered, frozenset({node(9)}), 16) is None


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Stage(0, 4, True), Stage(4, 16, False, True)),
        (Stage(12, 16, False, True), Stage(0, 12, True)),
        (Stage(0, 0, True), Stage(0, 16, False, True)),
    ],
)
def test_beside_one_end_of_ones_own_others_keep_the_other(stage: Stage, expected: Stage) -> None:
    assert between_own([shard(1, 0, 15)], [Placed(node(9), "", stage)])[1].stage == expected
