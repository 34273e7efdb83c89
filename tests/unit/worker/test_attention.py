"""A worker keeps off the daemons' core and looks for its messages while one answer is on its way, unless somebody else computes there."""

import os

import pytest

from potluck.core.looking import Avoidance
from potluck.core.processors import CoreHold, all_but_the_last
from potluck.worker.attention import Attention

EVERYWHERE, OFF_THE_LAST = {0, 1, 2}, {0, 1}


class Bench:
    """A worker on a machine with three cores, and a clock."""

    def __init__(self, hold: CoreHold, cores: dict[int, set[int]]) -> None:
        self.now_s = 100.0
        self.looks_s = 0.0
        self._cores = cores
        self.attention = Attention(self, hold, Avoidance(lambda: self.now_s))

    def look_for(self, look_s: float) -> None:
        self.looks_s = look_s

    @property
    def state(self) -> tuple[set[int], float]:
        return self._cores[0], self.looks_s

    def batches(self, count: int, took_s: float, computed_s: float) -> None:
        for _ in range(count):
            self.now_s += took_s
            self.attention.note(took_s, computed_s)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> Bench:
    where: dict[int, set[int]] = {0: EVERYWHERE}
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: set(where[task]), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", where.__setitem__, raising=False)
    return Bench(CoreHold(tmp_path, all_but_the_last), where)  # type: ignore[arg-type]


def test_while_it_is_told_to(bench: Bench) -> None:
    bench.attention.attend(0.003)
    assert bench.state == (OFF_THE_LAST, 0.003)
    bench.attention.attend(0.0)
    assert bench.state == (EVERYWHERE, 0.0)


def test_a_busy_host_is_no_reason_to_stop(bench: Bench) -> None:
    bench.attention.attend(0.003)
    bench.batches(500, 0.0015, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003)


def test_somebody_else_who_computes_there_is_left_alone_for_ever_longer(bench: Bench) -> None:
    bench.attention.attend(0.003)
    bench.batches(49, 0.002, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003), "a tenth of a second may be anything"
    bench.batches(2, 0.002, 0.001)
    assert bench.state == (EVERYWHERE, 0.0)
    bench.batches(490, 0.001, 0.001)
    assert bench.state == (EVERYWHERE, 0.0)
    bench.batches(20, 0.001, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003), "he may have gone"
    bench.batches(51, 0.002, 0.001)
    bench.batches(900, 0.001, 0.001)
    assert bench.state == (EVERYWHERE, 0.0), "he had not"
    bench.batches(110, 0.001, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003)


def test_also_over_the_end_of_an_answer(bench: Bench) -> None:
    bench.attention.attend(0.003)
    bench.batches(51, 0.002, 0.001)
    bench.attention.attend(0.0)
    bench.attention.attend(0.003)
    assert bench.state == (EVERYWHERE, 0.0)
    bench.batches(510, 0.001, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003)


def test_one_slow_batch_among_many_is_nothing(bench: Bench) -> None:
    bench.attention.attend(0.003)
    bench.batches(1, 0.03, 0.001)
    bench.batches(300, 0.001, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003)


def test_what_is_computed_without_being_told_says_nothing(bench: Bench) -> None:
    bench.batches(1000, 0.002, 0.001)
    assert bench.state == (EVERYWHERE, 0.0)
    bench.attention.attend(0.003)
    bench.batches(10, 0.001, 0.001)
    assert bench.state == (OFF_THE_LAST, 0.003)


def test_who_cannot_keep_off_does_not_look(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(task: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden, raising=False)
    bench.attention.attend(0.003)
    assert bench.state == (EVERYWHERE, 0.0)
