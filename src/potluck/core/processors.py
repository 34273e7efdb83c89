"""The machine's cores: how many are ours to use, giving one up for a moment, and keeping to some of them."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.core.control_groups import OWN_GROUPS, ControlGroups


def _keep() -> None:
    return


give_way = getattr(os, "sched_yield", _keep)
"""Lets whoever waits for this core have it first."""

_FEW = 4


@functools.cache
def _are_few() -> bool:
    return usable_cores() < _FEW


def give_way_where_few() -> None:
    """After a message has left, before what nobody waits for: on a small machine the one that it woke often waits for this very core.

    With more cores it finds another; and those who wait for this one may be looking for work of their own, without sleeping.
    """
    if _are_few():
        give_way()


def last_core(cores: set[int]) -> set[int]:
    """Where daemons keep to."""
    return {max(cores)}


def all_but_the_last(cores: set[int]) -> set[int]:
    """Where workers keep to, out of the daemons' way."""
    return cores - last_core(cores)


class CoreHold:
    """Keeps the thread that uses it to some of two or three cores while it is told to: a daemon's loop to the last, a worker to the others.

    One answer keeps one worker at a time busy, so that a core is always free for daemons; but left to itself the scheduler puts a daemon
    now on one core and now on another, in the way of a worker that is about to begin, and away from its own warm code (docs/hop.md).
    Of several nodes on a machine all daemons keep to the same core. Where a thread may not choose its cores, nothing happens.
    """

    def __init__(
        self, tasks: Path = Path("/proc/self/task"), chosen: Callable[[set[int]], set[int]] = last_core
    ) -> None:
        self._ours: set[int] = set()  # what was ours before; empty: nothing is held
        self._tasks, self._chosen = tasks, chosen

    def __repr__(self) -> str:
        return f"<CoreHold {f'of {self._chosen(self._ours)}' if self._ours else 'free'}>"

    def cores(self) -> set[int]:
        """Those that this process may run on, held or not."""
        return self._ours or _own_cores()

    def keep_while(self, is_wanted: bool) -> None:
        if is_wanted == bool(self._ours):
            return
        if not is_wanted:
            self._let_go(self._ours)
            self._ours = set()
        elif 1 < len(cores := _own_cores()) < _FEW and _put(0, self._chosen(cores)):
            self._ours = cores

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """For starting a process, which inherits where it may run."""
        was_held = bool(self._ours)
        self.keep_while(False)
        try:
            yield
        finally:
            self.keep_while(was_held)

    def _let_go(self, cores: set[int]) -> None:
        """Also the threads that were started meanwhile, which have inherited the one core."""
        _put(0, cores)
        with suppress(OSError):  # no /proc, or a thread that has ended since
            for task in self._tasks.iterdir():
                _put(int(task.name), cores)


def _own_cores() -> set[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity is not None else set(range(os.cpu_count() or 1))


def _put(task: int, cores: set[int]) -> bool:
    """Whether a thread may choose its cores, and has: not on every system, nor in every sandbox. 0: the thread that calls."""
    try:
        os.sched_setaffinity(task, cores)
    except (AttributeError, OSError):
        return False
    return True


LOOP_CORE = CoreHold()
"""Of this process, whose event loop is one thread."""


def own_cores() -> int:
    """Those that this process may run on."""
    return len(LOOP_CORE.cores())


def usable_cores(groups: ControlGroups = OWN_GROUPS) -> int:
    """The same, and no more than its control group is paid for: a container may see 64 and have two."""
    cores = own_cores()
    return min(cores, groups.cores() or cores)
