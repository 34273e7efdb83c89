"""The store of offers, and replacements for the gaps of a pipeline."""

import itertools
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from potluck.orchestrator.routing import SUSPICION_S, ShardStore
from potluck.planner.cover import Candidate, Placed, check_tiling, cover_around, greedy_cover
from potluck.planner.route import quickest_cover, quickest_replacements
from potluck.wire.messages import Described, ShardInfo, Stage

LAYERS = 16
Cover = Callable[[Sequence[Candidate], Stage], list[Placed] | None]


def node(number: int) -> bytes:
    return bytes([number]) * 32


def stage(lo: int, hi: int) -> Stage:
    return Stage(lo, hi + 1, lo == 0, hi == LAYERS - 1)


def candidate(number: int, lo: int, hi: int, depth: int = 0) -> Candidate:
    return Candidate(node(number), f"node:{number}", stage(lo, hi), depth)


def placed(number: int, lo: int, hi: int) -> Placed:
    return Placed(node(number), f"node:{number}", stage(lo, hi))


def shape(groups: list[list[Placed]] | None) -> list[list[tuple[int, int, int]]] | None:
    return None if groups is None else [[(p.node[0], p.stage.start, p.stage.stop - 1) for p in g] for g in groups]


KEPT = [placed(1, 0, 4), placed(2, 5, 9), placed(3, 10, 15)]


@pytest.mark.parametrize(
    ("gaps", "offers", "expected"),
    [
        ((1,), [candidate(9, 5, 9)], [[(1, 0, 4)], [(9, 5, 9)], [(3, 10, 15)]]),
        ((1,), [candidate(9, 0, 15)], [[(1, 0, 4)], [(9, 5, 9)], [(3, 10, 15)]]),
        ((1,), [candidate(8, 5, 6), candidate(9, 7, 12)], [[(1, 0, 4)], [(8, 5, 6), (9, 7, 9)], [(3, 10, 15)]]),
        ((0, 1), [candidate(9, 0, 9)], [[(9, 0, 9)], [], [(3, 10, 15)]]),
        ((0, 1, 2), [candidate(9, 0, 15)], [[(9, 0, 15)], [], []]),
        ((0, 2), [candidate(9, 0, 15)], [[(9, 0, 4)], [(2, 5, 9)], [(9, 10, 15)]]),
        ((1,), [candidate(9, 5, 8)], None),
        ((2,), [candidate(9, 10, 14)], None),
        ((), [], [[(1, 0, 4)], [(2, 5, 9)], [(3, 10, 15)]]),
    ],
)
def test_gaps_are_covered_and_the_rest_stays(
    gaps: tuple[int, ...], offers: list[Candidate], expected: list[list[tuple[int, int, int]]] | None
) -> None:
    kept = [None if index in gaps else p for index, p in enumerate(KEPT)]
    assert shape(quickest_replacements(kept, offers, frozenset(), LAYERS)) == expected


def test_the_excluded_are_not_chosen() -> None:
    offers = [candidate(8, 5, 9), candidate(9, 5, 9, depth=50)]
    groups = quickest_replacements([KEPT[0], None, KEPT[2]], offers, frozenset({node(8)}), LAYERS)
    assert shape(groups) == [[(1, 0, 4)], [(9, 5, 9)], [(3, 10, 15)]]


@pytest.mark.parametrize("seed", range(100))
def test_what_comes_out_is_always_a_pipeline(seed: int) -> None:
    draw = random.Random(seed)
    edges = [0, *sorted(draw.sample(range(1, LAYERS), draw.randint(1, 4))), LAYERS]
    whole = [placed(n, lo, hi - 1) for n, (lo, hi) in enumerate(itertools.pairwise(edges), start=1)]
    kept = [p if draw.random() < 0.6 else None for p in whole]
    offers = [
        candidate(50 + n, lo, draw.randint(lo, LAYERS - 1)) for n, lo in enumerate(draw.choices(range(LAYERS), k=8))
    ]
    groups = quickest_replacements(kept, [*offers, candidate(99, 0, 15, 9)], frozenset(), LAYERS)
    assert groups is not None
    assert len(groups) == len(kept)
    assert check_tiling([p.stage for group in groups for p in group], LAYERS) is None
    assert all(group == [p] for group, p in zip(groups, kept, strict=True) if p is not None)


# ---------------------------------------------------------------- the store


def info(
    lo: int,
    hi: int,
    *,
    weights: str = "a" * 64,
    arithmetic: int = 1,
    depth: int = 0,
    spare: bool = False,
    loaded: bool = True,
) -> ShardInfo:
    return ShardInfo("m", weights, arithmetic, LAYERS, stage(lo, hi), loaded, 16, 0, depth, 10, spare)


def store_of(*offers: tuple[int, ShardInfo], own: int | None = None) -> ShardStore:
    store = ShardStore()
    for number, shard in offers:
        store.put(
            node(number), f"node:{number}", Described(0, node(number), "1", (shard,), 1, (2,)), is_own=number == own
        )
    return store


def test_only_shards_of_exactly_this_model_are_candidates() -> None:
    store = store_of((1, info(0, 15)), (2, info(0, 15, weights="b" * 64)), (3, info(0, 15, arithmetic=2)))
    assert [c.node for c in store.candidates("a" * 64, 1, True)] == [node(1)]
    assert store.candidates("c" * 64, 1, True) == []


def test_the_same_weights_under_two_names_make_one_pipeline() -> None:
    store = store_of((1, info(0, 15)), (2, msgspec.structs.replace(info(16, 31), model="another")))
    assert [c.node for c in store.candidates("a" * 64, 1, True)] == [node(1), node(2)]
    assert "layer 0, " not in str(store.gap("m", "a" * 64, 32))


def test_weights_mismatch_is_said_so() -> None:
    """HearthNet §8.1: pipeline construction with a weights mismatch → weights_mismatch."""
    store = store_of((1, info(0, 15, weights="b" * 64)))
    gap = store.gap("m", "a" * 64, LAYERS)
    assert (gap.code, str(gap)) == ("weights_mismatch", "nobody holds m with weights aaaaaaaaaaaa")


def test_missing_layers_are_named() -> None:
    store = store_of((1, info(0, 4)), (2, info(7, 15)))
    gap = store.gap("m", "a" * 64, LAYERS)
    assert (gap.code, str(gap)) == ("shard_unavailable", "no shard holds layer 5, 6 of m")


def test_spares_come_after_everybody_else_and_ones_own_last() -> None:
    store = store_of((1, info(0, 15, depth=40)), (2, info(0, 15, spare=True)), (3, info(0, 15)), own=3)
    by_queue = sorted(store.candidates("a" * 64, 1, True), key=lambda c: c.queue_depth)
    assert [c.node for c in by_queue] == [node(1), node(2), node(3)]
    assert [c.node for c in store.candidates("a" * 64, 1, False)] == [node(1), node(2)]


@pytest.mark.parametrize("pick", [greedy_cover, quickest_cover])
def test_a_shard_that_must_load_first_is_used_where_loaded_ones_are_busy_or_missing(pick: Cover) -> None:
    def picked(*offers: tuple[int, ShardInfo]) -> list[bytes]:
        cover = pick(store_of(*offers).candidates("a" * 64, 1, True), stage(0, 15))
        return [] if cover is None else [each.node for each in cover]

    cold = info(0, 15, loaded=False)
    assert picked((1, cold), (2, info(0, 15))) == [node(2)]
    assert picked((1, cold), (2, info(0, 15, depth=5))) == [node(1)]
    assert picked((1, cold), (2, info(0, 15, spare=True))) == [node(1)]
    assert picked((1, msgspec.structs.replace(cold, is_spare=True)), (2, info(0, 15, spare=True))) == [node(2)]
    assert picked((1, cold)) == [node(1)]


def order(store: ShardStore, now_s: float) -> list[bytes]:
    found = store.candidates("a" * 64, 1, True, now_s)
    return [c.node for c in sorted(found, key=lambda c: c.queue_depth)]


def test_a_suspect_comes_after_spares_for_a_while_and_is_not_expelled() -> None:
    store = store_of((1, info(0, 15)), (2, info(0, 15, spare=True)), (3, info(0, 15)), own=3)
    store.suspect(node(1), 100.0)
    assert order(store, 100.0) == [node(2), node(1), node(3)]
    assert order(store, 100.0 + SUSPICION_S) == [node(1), node(2), node(3)]


@pytest.mark.parametrize("how", ["described", "worked"])
def test_a_suspect_that_shows_itself_is_cleared(how: str) -> None:
    store = store_of((1, info(0, 15)), (2, info(0, 15, spare=True)))
    store.suspect(node(1), 100.0)
    if how == "described":
        store.put(node(1), "node:1", Described(0, node(1), "1", (info(0, 15),), 1, (2,)))
    else:
        store.clear_suspicion(node(1))
    assert order(store, 100.0) == [node(1), node(2)]


def test_nobody_can_make_a_node_suspect_itself_or_remember_strangers() -> None:
    store = store_of((1, info(0, 15)), own=1)
    store.suspect(node(1), 100.0)
    store.suspect(node(9), 100.0)
    assert not store.is_suspect(node(1), 100.0)
    assert not store.is_suspect(node(9), 100.0)


def test_ones_own_streams_count_from_the_moment_they_begin_and_not_twice() -> None:
    def streams() -> list[int]:
        return [candidate.streams for candidate in store.candidates("a" * 64, 1, True)]

    def told(count: int) -> None:
        shard = msgspec.structs.replace(info(0, 15), streams=count)
        store.put(node(1), "node:1", Described(0, node(1), "1", (shard,), 1, (2,)))

    store = store_of((1, info(0, 15)), (2, info(0, 15)))
    for _ in range(16):
        store.begin_streams([node(1)], "a" * 64)
    store.begin_streams([node(2)], "b" * 64)  # another model on the second
    assert streams() == [16, 0]
    assert [candidate.is_full for candidate in store.candidates("a" * 64, 1, True)] == [True, False]
    told(18)  # by now it has said so itself, and somebody else has two
    assert streams() == [18, 0]
    for _ in range(16):
        store.end_streams([node(1)], "a" * 64)
    assert streams() == [2, 0]
    told(2)
    assert streams() == [2, 0]
    told(0)
    store.end_streams([node(1)], "a" * 64)  # one too many, by whatever mistake, does not count below nothing
    assert streams() == [0, 0]


def test_a_removed_node_offers_nothing() -> None:
    store = store_of((1, info(0, 15)))
    store.remove(node(1))
    store.remove(node(1))
    assert store.candidates("a" * 64, 1, True) == []
    assert store.models() == {}


# ---------------------------------------------------------------- a coordinator's own ends


def own(*stages: Stage) -> list[Placed]:
    return [Placed(node(0), "", each) for each in stages]


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ((), [(9, 0, 15)]),
        ((Stage(0, 5, True),), [(0, 0, 4), (9, 5, 15)]),
        ((Stage(5, 16, False, True),), [(9, 0, 4), (0, 5, 15)]),
        ((Stage(0, 5, True), Stage(12, 16, False, True)), [(0, 0, 4), (9, 5, 11), (0, 12, 15)]),
        ((Stage(0, 0, True), Stage(16, 16, False, True)), [(0, 0, -1), (9, 0, 15), (0, 16, 15)]),
        ((Stage(0, 8, True), Stage(8, 16, False, True)), [(0, 0, 7), (0, 8, 15)]),
        ((Stage(0, 16, True, True),), [(0, 0, 15)]),
        ((Stage(0, 16, True),), [(0, 0, 15), (9, 16, 15)]),
    ],
)
def test_others_cover_what_lies_between_ones_own_ends(
    mine: tuple[Stage, ...], expected: list[tuple[int, int, int]]
) -> None:
    cover = cover_around([candidate(9, 0, 15)], own(*mine), LAYERS)
    assert cover is not None
    assert [(p.node[0], p.stage.start, p.stage.stop - 1) for p in cover] == expected
    assert check_tiling([p.stage for p in cover], LAYERS) is None


def test_a_gap_between_ones_own_ends_stays_a_gap() -> None:
    assert cover_around([candidate(9, 6, 15)], own(Stage(0, 5, True)), LAYERS) is None


def test_reverse_routes_assign_no_output_to_others() -> None:
    """ds4: with the output at home, no remote stage has it, and none chooses tokens."""
    cover = cover_around([candidate(8, 0, 7), candidate(9, 4, 15)], own(Stage(12, 16, False, True)), LAYERS)
    assert cover is not None
    assert [p.stage.has_output for p in cover] == [False] * (len(cover) - 1) + [True]
    assert cover[-1].node == node(0)


def test_ones_own_shards_are_as_good_as_others_where_that_is_wanted() -> None:
    store = store_of((1, info(0, 15, depth=40)), (3, info(0, 15)), own=3)
    equal = store.candidates("a" * 64, 1, True, own="equal")
    assert min(equal, key=lambda c: c.queue_depth).node == node(3)


def test_ones_own_shards_come_first_once_others_have_failed_too_often() -> None:
    store = store_of((1, info(0, 15)), (2, info(0, 15, spare=True)), (3, info(0, 15, depth=40)), own=3)
    assert min(store.candidates("a" * 64, 1, True, own="first"), key=lambda c: c.queue_depth).node == node(3)
    assert [c.node for c in store.candidates("a" * 64, 1, False, own="first")] == [node(1), node(2)]
