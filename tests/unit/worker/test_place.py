"""A worker keeps off the daemons' core while one answer is on its way, unless somebody else computes where it keeps to."""

import os

import pytest

from potluck.core.processors import CoreHold, all_but_the_last
from potluck.worker.place import Place


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Of a machine with three; 0: the thread that calls."""
    where: dict[int, set[int]] = {0: {0, 1, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: set(where[task]), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", where.__setitem__, raising=False)
    return where


@pytest.fixture
def place(tmp_path: os.PathLike[str]) -> Place:
    return Place(CoreHold(tmp_path, all_but_the_last))  # type: ignore[arg-type]


def test_it_is_kept_while_told_to(cores: dict[int, set[int]], place: Place) -> None:
    place.keep(True)
    assert cores[0] == {0, 1}
    place.keep(False)
    assert cores[0] == {0, 1, 2}


def test_a_busy_host_is_no_reason_to_leave(cores: dict[int, set[int]], place: Place) -> None:
    place.keep(True)
    for _ in range(100):
        place.note(0.0015, 0.001)
    assert cores[0] == {0, 1}


def test_where_somebody_else_computes_it_is_left_for_the_rest_of_the_answer(
    cores: dict[int, set[int]], place: Place
) -> None:
    place.keep(True)
    for _ in range(11):
        place.note(0.002, 0.001)
    assert cores[0] == {0, 1, 2}
    for _ in range(100):
        place.note(0.001, 0.001)
    assert cores[0] == {0, 1, 2}
    place.keep(True)
    assert cores[0] == {0, 1}, "the next answer may be luckier"


def test_one_slow_batch_among_many_is_nothing(cores: dict[int, set[int]], place: Place) -> None:
    place.keep(True)
    place.note(0.004, 0.001)
    for _ in range(30):
        place.note(0.001, 0.001)
    assert cores[0] == {0, 1}


def test_what_it_computes_without_being_kept_is_not_remembered(cores: dict[int, set[int]], place: Place) -> None:
    for _ in range(100):
        place.note(0.002, 0.001)
    place.keep(True)
    place.note(0.001, 0.001)
    assert cores[0] == {0, 1}
