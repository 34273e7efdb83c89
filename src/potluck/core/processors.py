"""The machine's cores: how many are ours to use, and giving one up for a moment."""

import os

from potluck.core.control_groups import OWN_GROUPS, ControlGroups


def _keep() -> None:
    return


give_way = getattr(os, "sched_yield", _keep)
"""Lets whoever waits for this core have it first. After a message has left, and before whatever nobody waits for: the one that it woke
may be waiting for this very core, and on small machines often is."""


def usable_cores(groups: ControlGroups = OWN_GROUPS) -> int:
    """Those that this process may run on, and no more than its control group is paid for: a container may see 64 and have two."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, groups.cores() or cores)
