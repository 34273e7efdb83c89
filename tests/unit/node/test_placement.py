"""A shard's KV memory is what the plan set aside for it."""

from potluck.node.placement import kv_budget_bytes
from potluck.planner.costs import ModelCosts
from potluck.wire.messages import Stage

COSTS = ModelCosts(
    model="model", weights_sha256="5" * 64, layer_bytes=(100 << 20,) * 8, embedding_bytes=0, output_bytes=0,
    kv_bytes_per_token=4096, context_tokens=4096, streams=4,
)  # fmt: skip


def test_a_shard_gets_the_kv_of_all_streams_for_its_layers() -> None:
    half, whole = (kv_budget_bytes(COSTS, Stage(0, stop, True, stop == 8), 64 << 30) for stop in (4, 8))
    planned = COSTS.need_bytes(Stage(0, 4, True, False)) - COSTS.weight_bytes(Stage(0, 4, True, False))
    assert planned <= half <= planned * 1.02
    assert whole == 2 * half


def test_every_session_has_room_for_a_page_that_it_does_not_fill() -> None:
    budget = kv_budget_bytes(COSTS, Stage(0, 1, True, False), 64 << 30)
    pages_of_a_session = -(-(COSTS.context_tokens + 1) // 64)
    assert budget >= COSTS.streams * pages_of_a_session * 64 * COSTS.kv_bytes_per_token


def test_a_small_model_gets_somewhat_more_as_far_as_there_is_room() -> None:
    small = ModelCosts(
        model="model", weights_sha256="5" * 64, layer_bytes=(1 << 20,), embedding_bytes=0, output_bytes=0,
        kv_bytes_per_token=64, context_tokens=256,
    )  # fmt: skip
    stage = Stage(0, 1, True, True)
    assert kv_budget_bytes(small, stage, 1 << 30) == 64 << 20
    assert kv_budget_bytes(small, stage, 9 << 20) == 8 << 20
    assert kv_budget_bytes(small, stage, 0) == 64 * (256 + 64)
