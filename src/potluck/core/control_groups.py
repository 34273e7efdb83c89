"""What Linux grants the control group of this process: a container, or a service with a quota, may have less than it sees."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path(
    "/proc/self/cgroup"
)  # lines like `0::/user.slice/a.service`, or `4:memory:/docker/ab12` in the first hierarchy


class MemoryGrant(NamedTuple):
    limit_bytes: int
    free_bytes: int  # until the limit; pages of files that were read once can be had back


class ControlGroups:
    """Every group around this process counts, since each of them may be limited. Both versions of the hierarchy are read."""

    def __init__(self, root: Path = _ROOT, own: Path = _OWN) -> None:
        self._root, self._own = root, own

    def cores(self) -> int | None:
        """The fewest that a group is paid for, at least one; None without such a limit, or elsewhere than on Linux."""
        return min(filter(None, map(_cores, self._groups("cpu"))), default=None)

    def memory(self) -> MemoryGrant | None:
        """The group that has least left."""
        grants = filter(None, map(_memory, self._groups("memory")))
        return min(grants, key=lambda grant: grant.free_bytes, default=None)

    def _groups(self, controller: str) -> Iterator[Path]:
        """The process's own group and all around it. In a container some of them cannot be seen: they are not there, then."""
        for line in _text(self._own).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            folder = self._root / controller if controllers else self._root
            yield folder
            for name in Path(path).parts[1:]:
                folder /= name
                yield folder


OWN_GROUPS = ControlGroups()


def _cores(group: Path) -> int | None:
    quota_us, period_us = [*_text(group / "cpu.max").split(), "", ""][:2]  # `200000 100000`, or `max 100000`
    if not quota_us:
        quota_us, period_us = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    quota, period = _number(quota_us), _number(period_us)
    return max(1, math.ceil(quota / period)) if quota and period else None


def _memory(group: Path) -> MemoryGrant | None:
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(_text(group / limit_name)), _number(_text(group / used_name))
        if limit is not None and used is not None:
            kept = used - (_statistics(group).get(cached_name) or 0)
            return MemoryGrant(limit, max(0, limit - max(0, kept)))
    return None


def _statistics(group: Path) -> dict[str, int | None]:
    pairs = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
    return {name: _number(value) for name, _, value in pairs}


def _number(text: str) -> int | None:
    """None for `max`, -1 and whatever else is no limit."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not Linux, the other hierarchy, or the outermost group, which has no limits
        return ""
