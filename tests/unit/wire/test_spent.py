"""Times of a step by shard: always eight bytes each, whatever they are."""

import pytest

from potluck.wire.spent import MAX_STAGES, SPENT_BYTES, Spent, add_spent, read_spent


def test_each_shard_adds_its_own() -> None:
    spent = add_spent(add_spent(b"", 1500, 20), 1700, 0)
    assert len(spent) == 2 * SPENT_BYTES
    assert read_spent(spent) == (Spent(1500, 20), Spent(1700, 0))


@pytest.mark.parametrize(("told", "kept"), [(-1, 0), (1 << 32, (1 << 32) - 1), (1 << 62, (1 << 32) - 1)])
def test_what_does_not_fit_is_told_as_the_nearest_that_does(told: int, kept: int) -> None:
    assert read_spent(add_spent(b"", told, told)) == (Spent(kept, kept),)


def test_there_is_room_for_the_longest_pipeline_and_no_more() -> None:
    spent = b""
    for stage in range(MAX_STAGES + 3):
        spent = add_spent(spent, stage, 0)
    assert len(spent) == MAX_STAGES * SPENT_BYTES
    assert read_spent(spent)[-1] == Spent(MAX_STAGES + 2, 0)


@pytest.mark.parametrize("size", [0, 1, 5, 8, 13, 511, 512])
def test_whatever_came_before_a_shard_adds_one_whole_entry(size: int) -> None:
    spent = add_spent(bytes(size), 1500, 20)
    assert len(spent) == (min(size // SPENT_BYTES, MAX_STAGES - 1) + 1) * SPENT_BYTES
    assert read_spent(spent)[-1] == Spent(1500, 20)


@pytest.mark.parametrize("size", range(3 * SPENT_BYTES))
def test_bytes_that_are_no_whole_entry_tell_nothing(size: int) -> None:
    assert len(read_spent(bytes(size))) == size // SPENT_BYTES
