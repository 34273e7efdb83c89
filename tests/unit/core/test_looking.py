"""What came soon the last time is looked for, what took long is slept for; what turned out badly is left alone."""

from potluck.core.looking import Avoidance, Pace


def test_the_next_one_is_expected_to_take_as_long_as_the_last_one() -> None:
    pace = Pace(0.003)
    assert not pace.is_soon, "nothing is known yet"
    for began_s, ended_s, is_soon in [(5.0, 5.002, True), (6.0, 6.0031, False), (7.0, 7.5, False), (8.0, 8.0, True)]:
        pace.begin(began_s)
        pace.end(ended_s)
        assert pace.is_soon == is_soon


def test_what_nobody_waited_for_says_nothing() -> None:
    pace = Pace(0.003)
    pace.end(1.0)
    assert not pace.is_soon
    pace.begin(2.0)
    pace.end(2.001)
    pace.end(9.0)
    assert pace.is_soon


def test_who_begins_again_waits_anew() -> None:
    pace = Pace(0.003)
    pace.begin(1.0)
    pace.begin(2.0)
    pace.end(2.001)
    assert pace.is_soon


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_what_turned_out_badly_again_is_left_alone_for_longer() -> None:
    clock = Clock()
    avoidance = Avoidance(clock)
    assert not avoidance.is_on
    for seconds in (0.5, 1.0, 2.0, 4.0, 8.0, 8.0):
        avoidance.begin()
        clock.now_s += seconds - 0.01
        assert avoidance.is_on
        clock.now_s += 0.02
        assert not avoidance.is_on
    clock.now_s += 1.0
    avoidance.begin()
    clock.now_s += 0.51
    assert not avoidance.is_on, "it had been well for a second"
