"""Which shards cover a model, and which lists of stages are a pipeline at all."""

import itertools
import random

import pytest

from potluck.planner.cover import Candidate, check_tiling, greedy_cover
from potluck.wire.messages import Stage


def candidate(number: int, lo: int, hi: int, layers: int = 16, **changes: object) -> Candidate:
    """Layers lo … hi, inclusive as the seeds have them, with the ends that belong to them."""
    stage = Stage(lo, hi + 1, lo == 0, hi == layers - 1)
    return Candidate(bytes([number]) * 32, f"node:{number}", stage, **changes)  # type: ignore[arg-type]


def whole(layers: int = 16) -> Stage:
    return Stage(0, layers, True, True)


def ranges(cover: object) -> list[tuple[int, int]]:
    assert cover is not None
    return [(placed.stage.start, placed.stage.stop - 1) for placed in cover]  # type: ignore[attr-defined]


def test_shard_router_cover_algorithm_hearthnet_8_1() -> None:
    """16-layer model + 3 advertised shards (0-7, 4-11, 8-15) → picks {0-7, 8-15}, ignores the overlapping one."""
    shards = [candidate(1, 0, 7), candidate(2, 4, 11), candidate(3, 8, 15)]
    for order in itertools.permutations(shards):
        assert ranges(greedy_cover(order, whole())) == [(0, 7), (8, 15)]


def test_the_shortest_queue_wins() -> None:
    shards = [candidate(1, 0, 15, queue_depth=3), candidate(2, 0, 7), candidate(3, 8, 15, queue_depth=1)]
    assert ranges(greedy_cover(shards, whole())) == [(0, 7), (8, 15)]


def test_on_equal_queues_the_nearer_one_wins_then_the_one_that_reaches_furthest() -> None:
    shards = [candidate(1, 0, 15), candidate(2, 0, 7, is_local=True), candidate(3, 0, 11)]
    cover = greedy_cover(shards, whole())
    assert cover is not None
    assert cover[0].node == bytes([2]) * 32
    assert ranges(greedy_cover([candidate(1, 0, 7), candidate(2, 0, 11), candidate(3, 8, 15)], whole())) == [
        (0, 11),
        (12, 15),
    ]


def test_every_node_comes_to_the_same_cover() -> None:
    shards = [candidate(number, 0, 15) for number in range(1, 9)]
    covers = {greedy_cover(random.Random(seed).sample(shards, 8), whole())[0].node for seed in range(20)}  # type: ignore[index]
    assert covers == {bytes([1]) * 32}


def test_only_the_part_that_is_needed_of_a_wider_shard_is_used() -> None:
    [placed] = greedy_cover([candidate(1, 0, 15, step_us=1600)], Stage(4, 8)) or []
    assert placed.stage == Stage(4, 8, False, False)
    assert placed.step_us == 400


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [candidate(1, 0, 7)],
        [candidate(1, 8, 15)],
        [candidate(1, 0, 6), candidate(2, 8, 15)],
        [candidate(1, 1, 15)],
        [Candidate(bytes(32), "", Stage(0, 16, False, True))],  # nobody has the embedding
        [Candidate(bytes(32), "", Stage(0, 16, True, False))],  # nobody has the output
    ],
)
def test_none_where_something_has_no_holder(shards: list[Candidate]) -> None:
    assert greedy_cover(shards, whole()) is None


def test_embedding_and_output_alone_are_stages_too() -> None:
    ends = [
        Candidate(bytes([1]) * 32, "", Stage(0, 0, True)),
        Candidate(bytes([2]) * 32, "", Stage(16, 16, False, True)),
    ]
    middle = Candidate(bytes([3]) * 32, "", Stage(0, 16), 5)
    cover = greedy_cover([*ends, middle], whole())
    assert cover is not None
    assert [placed.stage for placed in cover] == [Stage(0, 0, True), Stage(0, 16), Stage(16, 16, False, True)]


@pytest.mark.parametrize("seed", range(200))
def test_a_cover_tiles_the_model_and_is_found_where_there_is_one(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 10)
    shards = []
    for number in range(draw.randint(1, 8)):
        lo = draw.randrange(layers)
        shards.append(candidate(number, lo, draw.randint(lo, layers - 1), layers, queue_depth=draw.randint(0, 2)))
    cover = greedy_cover(shards, whole(layers))
    reach = 0
    for _ in shards:  # plain search: from each layer that can be reached, as far as anybody goes
        reach = max([reach, *(c.stage.stop for c in shards if c.stage.start <= reach)])
    assert (cover is not None) == (reach == layers)
    if cover is not None:
        assert check_tiling([placed.stage for placed in cover], layers) is None
        offered = {c.node: c.stage for c in shards}
        assert all(offered[p.node].start <= p.stage.start and p.stage.stop <= offered[p.node].stop for p in cover)


# ---------------------------------------------------------------- tilings, each refusal with its own words


@pytest.mark.parametrize(
    "stages",
    [
        [whole()],
        [Stage(0, 8, True), Stage(8, 16, False, True)],
        [Stage(0, 0, True), Stage(0, 16), Stage(16, 16, False, True)],
        [Stage(0, 3, True), Stage(3, 4), Stage(4, 16, False, True)],
    ],
)
def test_valid_pipelines(stages: list[Stage]) -> None:
    assert check_tiling(stages, 16) is None


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "at least one shard"),
        ([Stage(1, 16, False, True)], "begin at layer 0 and own the embedding"),
        ([Stage(0, 16, False, True)], "begin at layer 0 and own the embedding"),
        ([Stage(0, 15, True, False)], "reach layer 15 and own the output"),
        ([Stage(0, 16, True, False)], "reach layer 15 and own the output"),
        ([Stage(0, 7, True), Stage(8, 16, False, True)], "nobody holds layers 7-7"),
        ([Stage(0, 9, True), Stage(8, 16, False, True)], "layers 8-8 are in two shards"),
        ([Stage(0, 8, True, True), Stage(8, 16, False, True)], "only the last shard has the output"),
        ([Stage(0, 8, True), Stage(8, 16, True, True)], "only the first the embedding"),
        ([Stage(0, 8, True), Stage(8, 6), Stage(6, 16, False, True)], "layers 8-5 are not a range"),
    ],
)
def test_invalid_pipelines_say_what_is_wrong(stages: list[Stage], words: str) -> None:
    problem = check_tiling(stages, 16)
    assert problem is not None
    assert words in problem
