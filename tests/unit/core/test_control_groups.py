"""What a container or a service with a quota may have: cores and memory, in both hierarchies of control groups."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from potluck.core.control_groups import ControlGroups, MemoryGrant
from potluck.core.memory import memory_available_bytes, memory_total_bytes
from potluck.core.processors import usable_cores

MIB = 1 << 20


def groups_of(folder: Path, own: str, files: dict[str, object]) -> ControlGroups:
    (folder / "own").write_text(own)
    for name, content in files.items():
        file = folder / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return ControlGroups(folder / "fs", folder / "own")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("6400000 100000", 64), ("max 100000", None),
        ("", None), ("100000", None), ("100000 0", None), ("0 100000", None), ("nonsense", None), ("٣ ١", None), ("-1 -1", None),
    ],
)  # fmt: skip
def test_a_share_of_the_processor_is_a_number_of_cores(quota: str, cores: int | None, tmp_path: Path) -> None:
    assert groups_of(tmp_path, "0::/", {"cpu.max": quota}).cores() == cores


def test_the_first_hierarchy_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = {
        "cpu/docker/ab/cpu.cfs_quota_us": 150_000, "cpu/docker/ab/cpu.cfs_period_us": 100_000,
        "cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100_000,
        "memory/docker/ab/memory.limit_in_bytes": 500 * MIB, "memory/docker/ab/memory.usage_in_bytes": 300 * MIB,
        "memory/docker/ab/memory.stat": f"cache 1\ntotal_inactive_file {100 * MIB}", "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 900 * MIB,
    }  # fmt: skip
    groups = groups_of(tmp_path, "5:memory:/docker/ab\n3:cpuacct,cpu:/docker/ab\n0::/\n", files)
    assert (groups.cores(), groups.memory()) == (2, MemoryGrant(500 * MIB, 300 * MIB))


def test_a_group_around_ones_own_may_be_the_narrower_one(tmp_path: Path) -> None:
    files = {
        "user.slice/cpu.max": "100000 100000", "user.slice/a.service/cpu.max": "400000 100000",
        "user.slice/memory.max": 800 * MIB, "user.slice/memory.current": 700 * MIB,
        "user.slice/a.service/memory.max": 400 * MIB, "user.slice/a.service/memory.current": 10 * MIB,
    }  # fmt: skip
    groups = groups_of(tmp_path, "0::/user.slice/a.service", files)
    assert (groups.cores(), groups.memory()) == (1, MemoryGrant(800 * MIB, 100 * MIB))


def test_in_a_container_the_path_may_be_the_hosts_and_the_files_those_of_the_group_itself(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": 400 * MIB, "memory/memory.usage_in_bytes": 500 * MIB}
    groups = groups_of(tmp_path, "5:memory:/docker/not/seen/here\n0::/../outside\n", files)
    assert (groups.cores(), groups.memory()) == (None, MemoryGrant(400 * MIB, 0))


@pytest.mark.parametrize("own", ["", "0::/", "0::/a.service", "4:memory:/\n1:cpu:/"])
def test_without_limits_there_is_none(own: str, tmp_path: Path) -> None:
    groups = groups_of(tmp_path, own, {"a.service/memory.max": "max", "a.service/memory.current": 5})
    assert (groups.cores(), groups.memory()) == (None, None)
    assert ControlGroups(tmp_path / "nowhere", tmp_path / "nothing").memory() is None


def test_nodes_count_with_the_smaller_of_what_they_see_and_what_they_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=900 * MIB, available=200 * MIB))
    files = {"cpu.max": "300000 100000", "memory.max": 500 * MIB, "memory.current": 100 * MIB}
    limited, free = groups_of(tmp_path, "0::/", files), ControlGroups(tmp_path, tmp_path / "nothing")
    assert (usable_cores(limited), usable_cores(free)) == (3, 8)
    assert (memory_total_bytes(limited), memory_available_bytes(limited)) == (500 * MIB, 200 * MIB)
    assert (memory_total_bytes(free), memory_available_bytes(free)) == (900 * MIB, 200 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=900 * MIB, available=800 * MIB))
    assert memory_available_bytes(limited) == 400 * MIB


def test_cores_are_those_that_the_process_may_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert usable_cores(groups_of(tmp_path, "0::/", {"cpu.max": "6400000 100000"})) == 3
