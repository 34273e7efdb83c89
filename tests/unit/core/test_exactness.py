"""What an answer may expect of the shards that took part in it."""

import pytest

from potluck.core.exactness import KNOWN_ARITHMETICS, Exactness, arithmetic_of, exactness_of, weakest

CPU, GPU = arithmetic_of("cpu"), arithmetic_of("cuda:1")
INVARIANT = arithmetic_of("cuda", is_batch_invariant=True)


@pytest.mark.parametrize(
    ("used", "failovers", "level"),
    [
        ((CPU,), 0, "bitwise"), ((CPU,), 3, "bitwise"), ((GPU,), 0, "tolerance"), ((INVARIANT,), 0, "batch-invariant"),
        ((INVARIANT,), 1, "tolerance"), ((CPU, GPU), 0, "mixed"), ((GPU, INVARIANT), 1, "mixed"), ((), 0, "bitwise"),
    ],
)  # fmt: skip
def test_the_level_follows_from_who_took_part(used: tuple[int, ...], failovers: int, level: Exactness) -> None:
    assert exactness_of(used, failovers) == level


def test_several_choices_are_as_exact_as_the_weakest() -> None:
    assert weakest(["bitwise", "mixed", "tolerance"]) == "mixed"
    assert weakest(["batch-invariant", "bitwise"]) == "batch-invariant"
    assert weakest([]) == "bitwise"


def test_every_kind_has_a_number_of_its_own() -> None:
    assert sorted(KNOWN_ARITHMETICS) == sorted({CPU, GPU, INVARIANT})
