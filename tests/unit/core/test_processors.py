"""The number of cores that a node counts with."""

import os
from pathlib import Path

import pytest

from potluck.core.processors import usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000\n", 2), ("150000 100000\n", 2), ("1000 100000\n", 1), ("6400000 100000\n", 8), ("max 100000\n", 8),
        ("", 8), ("100000", 8), ("100000 0", 8), ("nonsense", 8),
    ],
)  # fmt: skip
def test_a_control_groups_share_counts(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_without_a_control_group_it_is_what_the_process_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert usable_cores(tmp_path / "cpu.max") == 3
