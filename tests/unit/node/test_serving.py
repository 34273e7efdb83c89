"""What a shard may take of a machine's memory: what its weights leave of the budget is for KV."""

import pytest

from potluck.core.errors import BadRequest
from potluck.node.serving import ServingSettings, parse_stage, within_memory
from tests.support.stored_models import MEGABYTE, stored_model


@pytest.mark.parametrize(
    ("layers", "is_tied", "kv_megabytes"),
    [(None, False, 50), ("0-1", False, 75), ("2-output", False, 75), ("1-2", False, 80), (None, True, 55), ("3-output", True, 85)],
)  # fmt: skip
def test_kv_gets_what_the_weights_leave(layers: str | None, is_tied: bool, kv_megabytes: int) -> None:
    settings = within_memory(stored_model(is_tied=is_tied), parse_stage(layers, 4), ServingSettings(), 100 * MEGABYTE)
    assert settings.kv_budget_bytes == kv_megabytes * MEGABYTE


def test_a_large_budget_changes_nothing() -> None:
    assert within_memory(stored_model(), parse_stage(None, 4), ServingSettings(), 1 << 40) == ServingSettings()


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    with pytest.raises(BadRequest, match=r"layers 0-1, the embedding of m take 25.0 MB, and shards may have 25.0 MB"):
        within_memory(stored_model(), parse_stage("0-1", 4), ServingSettings(), 25 * MEGABYTE)
