"""How many of the machine's cores are ours to use."""

import os

from potluck.core.control_groups import OWN_GROUPS, ControlGroups


def usable_cores(groups: ControlGroups = OWN_GROUPS) -> int:
    """Those that this process may run on, and no more than its control group is paid for: a container may see 64 and have two."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, groups.cores() or cores)
