"""Pipelines of one kind of device, and when others are taken."""

import pytest

from potluck.core.exactness import arithmetic_of
from potluck.planner.alike import MIXED_GAIN, Replacer, kinds_of, pick_pipeline
from potluck.planner.cover import Candidate, Placed
from potluck.planner.shortest_path import RouteRules
from potluck.wire.messages import Stage

CPU, GPU = arithmetic_of("cpu"), arithmetic_of("cuda")
LAYERS = 8
RULES = RouteRules()


def holder(number: int, arithmetic: int, lo: int = 0, hi: int = LAYERS, layer_s: float = 0.001) -> Candidate:
    stage = Stage(lo, hi, lo == 0, hi == LAYERS)
    return Candidate(bytes([number]) * 32, "", stage, is_local=True, layer_s=layer_s, hop_s=0.0, arithmetic=arithmetic)


def nodes_of(pipeline: list[Placed] | None) -> list[int]:
    assert pipeline is not None
    return [placed.node[0] for placed in pipeline]


def test_stages_carry_the_arithmetic_of_their_shards() -> None:
    found = pick_pipeline([holder(1, CPU, 0, 4), holder(2, GPU, 4, 8)], [], LAYERS, RULES)
    assert found is not None
    assert [placed.arithmetic for placed in found] == [CPU, GPU]


@pytest.mark.parametrize(("gpu_layer_s", "expected"), [(0.0009, [1]), (0.0001, [2, 1])])
def test_shards_of_one_kind_are_taken_unless_others_make_it_much_quicker(
    gpu_layer_s: float, expected: list[int]
) -> None:
    """Half of the layers on a GPU: a tenth of a layer's time saves little, nine tenths much."""
    everybody = [holder(1, CPU), holder(2, GPU, 0, 4, gpu_layer_s)]
    assert 0.05 < MIXED_GAIN < 0.8
    assert nodes_of(pick_pipeline(everybody, [], LAYERS, RULES)) == expected


def test_a_lost_shard_is_replaced_by_one_of_its_kind_even_if_another_is_quicker() -> None:
    lost, alike, other = holder(1, CPU), holder(2, CPU, layer_s=0.01), holder(3, GPU, layer_s=0.0001)
    replacer = Replacer([Placed(lost.node, "", lost.stage, 0, CPU)])
    groups = replacer.replacements([None], [lost, alike, other], frozenset({lost.node}), LAYERS, RULES)
    assert groups is not None
    assert nodes_of(groups[0]) == [2]
    assert replacer.kinds == {CPU}


def test_where_nobody_of_its_kind_is_left_another_kind_takes_over_and_belongs_to_it_then() -> None:
    lost, other = holder(1, CPU), holder(3, GPU)
    replacer = Replacer([Placed(lost.node, "", lost.stage, 0, CPU)])
    groups = replacer.replacements([None], [lost, other], frozenset({lost.node}), LAYERS, RULES)
    assert groups is not None
    assert kinds_of(groups[0]) == {GPU}
    assert replacer.kinds == {CPU, GPU}
    assert replacer.replacements([None], [lost], frozenset({lost.node}), LAYERS, RULES) is None
