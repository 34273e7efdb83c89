"""After a worker has died for lack of memory: whether it has, and how much less KV the next one may take. Pure.

Knows how a process ended and what it was allowed; not the process, nor who else uses the machine.
"""

import msgspec

from potluck.wire.worker_settings import OUT_OF_MEMORY_STATUS

_KILLED = -9  # by SIGKILL, a name that not every system has
_MOST_HALVINGS = 2  # a quarter: with less a shard of few streams serves nobody, and had better be given up


def has_run_out_of_memory(exit_status: int | None, *, is_own_kill: bool, host_kills: int | None) -> bool:
    """`exit_status`: negative for a signal. `is_own_kill`: we ended it. `host_kills`: how many processes the system has ended for lack
    of memory while this one ran; None where it does not say, and then a kill out of the blue is taken for one."""
    if exit_status == OUT_OF_MEMORY_STATUS:
        return True
    return exit_status == _KILLED and not is_own_kill and host_kills != 0


class MemoryLimit(msgspec.Struct, frozen=True):
    """What a worker may take for KV: half of it after every death for lack of memory, down to a quarter of what was planned."""

    planned_bytes: int
    deaths: int = 0

    @property
    def kv_budget_bytes(self) -> int:
        return self.planned_bytes >> min(self.deaths, _MOST_HALVINGS)

    @property
    def is_lowered(self) -> bool:
        return self.deaths > 0

    def after_death(self) -> "MemoryLimit":
        return MemoryLimit(self.planned_bytes, self.deaths + 1)
