"""What layers take on a GPU, from formats and shapes alone."""

from typing import NamedTuple

import pytest

from potluck.core.device_facts import RESERVE_BYTES, DeviceFacts
from potluck.weights.device_memory import device_growth, tensor_bytes, vram_required_mb

GIB = 1 << 30


class Tensor(NamedTuple):
    format: str
    shape: tuple[int, ...]


@pytest.mark.parametrize(
    ("format_name", "size_bytes"), [("BF16", 2 * 8192), ("Q4_0", 18 * 256), ("Q5_0", 34 * 256), ("Q8_0", 34 * 256)]
)
def test_a_matrix_takes_what_its_form_on_the_device_takes(format_name: str, size_bytes: int) -> None:
    assert tensor_bytes(Tensor(format_name, (32, 256))) == size_bytes


def test_norms_are_float32_there() -> None:
    assert tensor_bytes(Tensor("F16", (256,))) == 1024


def test_growth_is_that_of_the_worst_part_and_never_below_one() -> None:
    same = {"layers.0.query": Tensor("Q4_0", (32, 256)), "embedding": Tensor("BF16", (64, 32))}
    assert device_growth(same) == 1.0
    wider = same | {"layers.1.query": Tensor("Q5_0", (32, 256))}
    assert device_growth(wider) == pytest.approx(34 / 22)
    assert device_growth({}) == 1.0


def test_what_is_required_has_a_reserve_in_it() -> None:
    assert vram_required_mb(3_000_000, 2_000_000) == 5 + -(-RESERVE_BYTES // 1_000_000)


def test_a_budget_is_what_is_free_beside_a_reserve_within_the_owners_limit() -> None:
    facts = DeviceFacts("cuda", "a GPU", 24 * GIB, 10 * GIB, 1e12)
    assert facts.budget_bytes(100 * GIB) == 9 * GIB
    assert facts.budget_bytes(4 * GIB) == 4 * GIB
    assert facts.budget_bytes(100 * GIB, held_bytes=3 * GIB) == 12 * GIB
    assert DeviceFacts("cuda", "a GPU", GIB, GIB // 2, 1e12).budget_bytes(GIB) == 0
