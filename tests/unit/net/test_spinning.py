"""A loop that stays awake for a while, on a loop that only keeps what it is to call."""

from collections.abc import Callable

import pytest

from potluck.net.spinning import Spinner


class KeptCalls:
    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def test_it_turns_from_the_first_touch_until_it_is_stopped() -> None:
    loop = KeptCalls()
    spinner = Spinner(loop, 3600.0)  # type: ignore[arg-type]
    spinner.touch()
    spinner.touch()
    assert len(loop.calls) == 1
    loop.turn()
    loop.turn()
    assert len(loop.calls) == 1
    spinner.stop()
    loop.turn()
    assert loop.calls == []
    spinner.touch()
    assert len(loop.calls) == 1


def test_who_turns_gives_way_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr("potluck.net.spinning.give_way_where_few", lambda: given.append(1))
    loop = KeptCalls()
    spinner = Spinner(loop, 3600.0)  # type: ignore[arg-type]
    spinner.touch()
    loop.turn()
    loop.turn()
    assert len(given) == 2
    spinner.stop()
    loop.turn()
    assert len(given) == 2


def test_without_a_time_it_does_nothing() -> None:
    loop = KeptCalls()
    Spinner(loop, 0.0).touch()  # type: ignore[arg-type]
    assert loop.calls == []


def test_it_can_be_kept_awake_once_where_it_is_not_by_touching() -> None:
    loop = KeptCalls()
    spinner = Spinner(loop, 0.0)  # type: ignore[arg-type]
    spinner.stay_awake(3600.0)
    spinner.touch()
    loop.turn()
    assert len(loop.calls) == 1
    spinner.stay_awake(0.0)
    loop.turn()
    assert loop.calls == []


def test_what_it_was_kept_awake_for_has_come_and_touching_counts_again() -> None:
    quiet_loop, busy_loop = KeptCalls(), KeptCalls()
    quiet, busy = Spinner(quiet_loop, 0.0), Spinner(busy_loop, 3600.0)  # type: ignore[arg-type]
    for spinner in (quiet, busy):
        spinner.stay_awake(3600.0)
        spinner.rest()
    quiet_loop.turn()
    busy_loop.turn()
    assert (len(quiet_loop.calls), len(busy_loop.calls)) == (0, 1)
