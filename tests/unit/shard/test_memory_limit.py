"""What counts as a death for lack of memory, and what the next worker may take."""

import signal

import pytest

from potluck.shard.memory_limit import MemoryLimit, has_run_out_of_memory
from potluck.wire.worker_settings import OUT_OF_MEMORY_STATUS


@pytest.mark.parametrize(
    ("status", "is_own_kill", "host_kills", "has_run_out"),
    [
        (OUT_OF_MEMORY_STATUS, False, 0, True),  # as it says itself
        (-signal.SIGKILL, False, 1, True),
        (-signal.SIGKILL, False, None, True),  # a system that does not count
        (-signal.SIGKILL, False, 0, False),  # somebody's kill -9
        (-signal.SIGKILL, True, 1, False),  # it was frozen, and we ended it
        (-signal.SIGSEGV, False, 1, False),
        (70, False, 1, False),  # a bug
        (0, False, 1, False),
        (None, False, 1, False),  # not known yet
    ],
)
def test_a_death_is_for_lack_of_memory_where_worker_or_system_say_so(
    status: int | None, is_own_kill: bool, host_kills: int | None, has_run_out: bool
) -> None:
    assert has_run_out_of_memory(status, is_own_kill=is_own_kill, host_kills=host_kills) is has_run_out


def test_every_such_death_halves_the_kv_down_to_a_quarter() -> None:
    limit = MemoryLimit(1000)
    assert not limit.is_lowered
    budgets = []
    for _ in range(4):
        limit = limit.after_death()
        budgets.append(limit.kv_budget_bytes)
    assert budgets == [500, 250, 250, 250]
    assert limit.is_lowered
    assert limit.deaths == 4
