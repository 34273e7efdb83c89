"""How much of the machine's memory is ours to use."""

import psutil

from potluck.core.control_groups import OWN_GROUPS, ControlGroups


def memory_total_bytes(groups: ControlGroups = OWN_GROUPS) -> int:
    """The machine's, or what its container or service may have of it."""
    total, grant = int(psutil.virtual_memory().total), groups.memory()
    return total if grant is None else min(total, grant.limit_bytes)


def memory_available_bytes(groups: ControlGroups = OWN_GROUPS) -> int:
    available, grant = int(psutil.virtual_memory().available), groups.memory()
    return available if grant is None else min(available, grant.free_bytes)
