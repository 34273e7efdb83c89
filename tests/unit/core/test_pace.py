"""What came soon the last time is looked for; what took long is slept for."""

from potluck.core.pace import Pace


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
