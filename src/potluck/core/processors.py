"""The machine's cores: how many are ours to use, giving one up for a moment, and keeping to some of them."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.core.control_groups import OWN_GROUPS, ControlGroups
from potluck.core.looking import Avoidance


def _keep() -> None:
    return


give_way = getattr(os, "sched_yield", _keep)
"""Lets whoever waits for this core have it first."""

_FEW = 4
_LONG_TURN_S = 0.001  # daemons have done what they have to do in a tenth of it
# A program that computes takes every second turn, one that is over in a moment only a few.
_MOST_LOST, _WINDOW_S = 6, 0.1


class Crowd:
    """Whether some program computes on the core of whoever gives way there: then he loses milliseconds each time, as he does not look like
    somebody who has slept and may go first. He had better not give way for a while.

    `is_heeded`: to be set while nobody of our own computes on that core, or it would be taken for somebody else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, give_way: Callable[[], None] = give_way) -> None:
        self._clock, self._give_way = clock, give_way
        self.is_heeded = False
        self._lost_s: list[float] = []  # when turns were lost
        self._avoidance = Avoidance(clock)

    def __repr__(self) -> str:
        return f"<Crowd {'is there' if self.is_there else f'perhaps, {len(self._lost_s)} turns were lost'}>"

    @property
    def is_there(self) -> bool:
        return self.is_heeded and self._avoidance.is_on

    def give_way(self, is_late: Callable[[], bool] = lambda: True) -> None:
        """`is_late`: asked after a long turn, whether something has waited meanwhile; if not, nothing was lost."""
        if not self.is_heeded:
            self._give_way()
            return
        began_s = self._clock()
        self._give_way()
        ended_s = self._clock()
        if ended_s - began_s > _LONG_TURN_S and is_late():
            self._lost_s = [*(lost_s for lost_s in self._lost_s if ended_s - lost_s < _WINDOW_S), ended_s]
            if len(self._lost_s) >= _MOST_LOST:
                self._lost_s = []
                self._avoidance.begin()


CROWD = Crowd()
"""On the core of this process's only thread that gives way."""


@functools.cache
def are_few() -> bool:
    return usable_cores() < _FEW


def give_way_where_few() -> None:
    """After a message has left, before what nobody waits for: on a small machine the one that it woke often waits for this very core.

    With more cores it finds another; and those who wait for this one may be looking for work of their own, without sleeping.
    """
    if are_few() and not CROWD.is_there:
        CROWD.give_way()


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

    def keep_while(self, is_wanted: bool) -> bool:
        """Whether it is held now."""
        if self._ours and not is_wanted:
            self._let_go(self._ours)
            self._ours = set()
        elif is_wanted and not self._ours and 1 < len(cores := _own_cores()) < _FEW and _put(0, self._chosen(cores)):
            self._ours = cores
        return bool(self._ours)

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
    """Those that this process may run on, and no more than its control group is paid for: a container may see 64 and have two."""
    cores = own_cores()
    return min(cores, groups.cores() or cores)
