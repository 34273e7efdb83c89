"""The file by which commands find the node of their home, and the lock that says whether it lives."""

import os
from pathlib import Path

import pytest

from potluck.core.errors import BadRequest
from potluck.node.run_file import RunFile, RunningNode


def running(pid: int) -> RunningNode:
    return RunningNode(pid, "aa", "bb", ("127.0.0.1:1",), "")


def test_a_node_is_found_while_it_runs_and_not_afterwards(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "node.run")
    with file.held():
        file.write(running(os.getpid()))
        assert RunFile(tmp_path / "node.run").read() == running(os.getpid())
    assert file.read() is None
    assert not (tmp_path / "node.run").exists()


def test_the_file_of_a_killed_node_is_stale_also_where_its_number_is_somebody_elses_by_now(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "node.run")
    file.write(running(os.getpid()))  # this process lives, and is no node
    assert file.read() is None
    with file.held():
        assert file.read() is None  # the next one has begun, and has not said where it is


def test_there_is_one_node_to_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.node.run_file._HOLD_PATIENCE_S", 0.0)
    first, second = RunFile(tmp_path / "node.run"), RunFile(tmp_path / "node.run")
    with first.held(), pytest.raises(BadRequest, match="running already"), second.held():
        pass


def test_what_goes_wrong_in_the_node_is_not_taken_for_another_node(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), RunFile(tmp_path / "node.run").held():
        raise TimeoutError
