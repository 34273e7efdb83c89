"""The machine's cores: how many are ours to use, and giving one up for a moment."""

import functools
import os

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


def usable_cores(groups: ControlGroups = OWN_GROUPS) -> int:
    """Those that this process may run on, and no more than its control group is paid for: a container may see 64 and have two."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, groups.cores() or cores)
