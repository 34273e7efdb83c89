"""Keeping a loop to one core: only where cores are few, undone for children and for threads that were started meanwhile."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.core.control_groups import ControlGroups
from potluck.core.processors import (
    LOOP_CORE,
    CoreHold,
    Crowd,
    all_but_the_last,
    are_few,
    give_way_where_few,
    usable_cores,
)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Where each thread was put last; 0: the one that calls. A machine with three cores, one of which is somebody else's."""
    where: dict[int, set[int]] = {0: {1, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: set(where[task]), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", where.__setitem__, raising=False)
    return where


@pytest.fixture
def hold(tmp_path: Path) -> CoreHold:
    for task in ("71", "72"):
        (tmp_path / task).mkdir()
    return CoreHold(tmp_path)


def test_keeps_to_the_last_core_and_lets_go_of_it(placed: dict[int, set[int]], hold: CoreHold) -> None:
    hold.keep_while(True)
    assert placed == {0: {2}}
    assert hold.cores() == {1, 2}
    hold.keep_while(True)
    assert hold.cores() == {1, 2}
    hold.keep_while(False)
    assert placed == {0: {1, 2}, 71: {1, 2}, 72: {1, 2}}


def test_or_to_all_others(placed: dict[int, set[int]], tmp_path: Path) -> None:
    placed[0] = {0, 1, 2}
    hold = CoreHold(tmp_path, all_but_the_last)
    hold.keep_while(True)
    assert placed == {0: {0, 1}}
    hold.keep_while(False)
    assert placed == {0: {0, 1, 2}}


@pytest.mark.parametrize("cores", [{0}, {0, 1, 2, 3}, set(range(16))])
def test_does_nothing_where_there_is_one_core_or_enough(
    placed: dict[int, set[int]], hold: CoreHold, cores: set[int]
) -> None:
    placed[0] = set(cores)
    hold.keep_while(True)
    assert placed == {0: cores}
    hold.keep_while(False)
    assert placed == {0: cores}


def test_is_suspended_while_a_process_is_started(placed: dict[int, set[int]], hold: CoreHold) -> None:
    hold.keep_while(True)
    with hold.suspended():
        assert placed[0] == {1, 2}
    assert placed[0] == {2}
    with pytest.raises(FileNotFoundError), hold.suspended():
        subprocess.run(["/no/such/program"], check=False)
    assert placed[0] == {2}
    hold.keep_while(False)
    with hold.suspended():
        assert placed[0] == {1, 2}
    assert placed[0] == {1, 2}


def _forbidden(task: int, cores: set[int]) -> None:
    raise PermissionError


@pytest.mark.parametrize("unset", [True, False])
def test_does_nothing_where_a_thread_may_not_choose(
    placed: dict[int, set[int]], hold: CoreHold, unset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unset:
        monkeypatch.delattr(os, "sched_setaffinity")
    else:
        monkeypatch.setattr(os, "sched_setaffinity", _forbidden)
    hold.keep_while(True)
    assert not hold._ours
    hold.keep_while(False)
    assert placed == {0: {1, 2}}


def test_a_held_process_still_knows_its_cores(placed: dict[int, set[int]], tmp_path: Path) -> None:
    LOOP_CORE.keep_while(True)
    try:
        assert placed[0] == {2}
        assert usable_cores(ControlGroups(tmp_path)) == 2
    finally:
        LOOP_CORE.keep_while(False)


def _cores_of_a_child() -> int:
    asked = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    return int(subprocess.run(asked, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="threads choose their cores on Linux")
def test_real_threads_and_processes() -> None:
    def held() -> None:
        ours = os.sched_getaffinity(0)
        if not 2 <= len(ours) <= 3:
            os.sched_setaffinity(0, (ours := set(sorted(ours)[:2])))
        if len(ours) < 2:
            return  # nothing to choose from
        hold = CoreHold()
        hold.keep_while(True)
        assert os.sched_getaffinity(0) == {max(ours)}
        let_go = threading.Event()
        seen: list[set[int]] = []
        thread = threading.Thread(target=_report_when(let_go, seen))
        thread.start()
        with hold.suspended():
            assert _cores_of_a_child() == len(ours)
        assert _cores_of_a_child() == 1
        hold.keep_while(False)
        assert os.sched_getaffinity(0) == ours
        let_go.set()
        thread.join()
        assert seen == [ours]

    errors: list[BaseException] = []
    thread = threading.Thread(target=_caught(held, errors))  # whose cores are nobody else's concern
    thread.start()
    thread.join()
    assert not errors, errors


def _report_when(let_go: threading.Event, seen: list[set[int]]) -> Callable[[], None]:
    def report() -> None:
        let_go.wait()
        seen.append(os.sched_getaffinity(0))

    return report


def _caught(work: Callable[[], None], errors: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    return run


class Turns:
    """A clock, and a core that is given back after `long_s`."""

    def __init__(self) -> None:
        self.now_s, self.long_s = 10.0, 0.0

    def clock(self) -> float:
        return self.now_s

    def give_way(self) -> None:
        self.now_s += self.long_s


def test_who_gives_way_to_a_program_that_computes_soon_stops_it_for_a_while() -> None:
    turns = Turns()
    crowd = Crowd(turns.clock, turns.give_way)
    crowd.is_heeded = True
    turns.long_s = 0.0001
    for _ in range(1000):
        crowd.give_way()
    assert not crowd.is_there
    turns.long_s = 0.004
    for _ in range(5):
        crowd.give_way()
    assert not crowd.is_there
    crowd.give_way()
    assert crowd.is_there
    turns.now_s += 0.6
    assert not crowd.is_there
    for _ in range(6):
        crowd.give_way()
    turns.now_s += 0.9
    assert crowd.is_there


def test_what_is_over_in_a_moment_is_no_crowd() -> None:
    turns = Turns()
    crowd = Crowd(turns.clock, turns.give_way)
    crowd.is_heeded = True
    turns.long_s = 0.01
    for _ in range(50):
        crowd.give_way()
        turns.now_s += 0.02
    assert not crowd.is_there


def test_a_long_turn_in_which_nothing_came_is_no_loss() -> None:
    turns = Turns()
    crowd = Crowd(turns.clock, turns.give_way)
    crowd.is_heeded = True
    turns.long_s = 0.002
    for _ in range(100):
        crowd.give_way(lambda: False)
    assert not crowd.is_there


def test_while_somebody_of_our_own_may_compute_there_no_turn_counts() -> None:
    turns = Turns()
    crowd = Crowd(turns.clock, turns.give_way)
    turns.long_s = 0.004
    for _ in range(100):
        crowd.give_way()
    crowd.is_heeded = True
    assert not crowd.is_there
    for _ in range(6):
        crowd.give_way()
    assert crowd.is_there
    crowd.is_heeded = False
    assert not crowd.is_there


@pytest.mark.parametrize(("cores", "is_crowded", "gives"), [(2, False, 1), (2, True, 0), (4, False, 0)])
def test_where_cores_are_few_and_nobody_else_wants_this_one_it_is_given_up(
    cores: int, is_crowded: bool, gives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    given: list[int] = []
    crowd = Crowd(turns.clock, lambda: given.append(1))
    if is_crowded:
        crowd.is_heeded = True
        crowd._avoidance.begin()
    monkeypatch.setattr("potluck.core.processors.CROWD", crowd)
    monkeypatch.setattr("potluck.core.processors.usable_cores", lambda: cores)
    are_few.cache_clear()
    give_way_where_few()
    are_few.cache_clear()
    assert len(given) == gives
