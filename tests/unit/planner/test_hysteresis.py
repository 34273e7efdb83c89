"""A change is followed after three rounds, a loss of coverage at once."""

from potluck.planner.hysteresis import ROUNDS, Hysteresis


def test_the_first_plan_is_followed_at_once() -> None:
    assert Hysteresis[str]().after("a", is_covered=True).followed == "a"


def test_a_change_is_followed_when_it_has_been_wanted_three_times_in_a_row() -> None:
    state = Hysteresis("a")
    seen = []
    for _ in range(ROUNDS):
        state = state.after("b", is_covered=True)
        seen.append(state.followed)
    assert seen == ["a", "a", "b"]
    assert state == Hysteresis("b")


def test_wanting_something_else_or_the_old_again_starts_over() -> None:
    for between in ("a", "c"):
        state = Hysteresis("a")
        for wanted in ("b", "b", between, "b", "b"):
            state = state.after(wanted, is_covered=True)
            assert state.followed == "a"
        assert state.after("b", is_covered=True).followed == "b"


def test_lost_coverage_is_answered_at_once() -> None:
    state = Hysteresis("a").after("b", is_covered=True)
    assert state.after("c", is_covered=False) == Hysteresis("c")
    assert Hysteresis("a").after("a", is_covered=False) == Hysteresis("a")


def test_flapping_wishes_are_never_followed() -> None:
    state = Hysteresis("a")
    for turn in range(100):
        state = state.after("b" if turn % 3 else "c", is_covered=True)
        assert state.followed == "a"
