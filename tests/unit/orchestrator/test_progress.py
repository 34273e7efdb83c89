"""When silence is looked into, and what is made of the answers."""

from potluck.orchestrator.progress import Finding, ProgressWatch
from potluck.orchestrator.recovery import HeadStage
from potluck.orchestrator.request import GenerationSettings
from potluck.planner.cover import Placed
from potluck.wire.messages import Probed, Stage

SETTINGS = GenerationSettings(probe_after_s=0.25, probe_patience_s=0.5, worker_patience_s=0.5, stall_timeout_s=5.0)
STAGES = [
    HeadStage(Placed(bytes([n]) * 32, f"node:{n}", Stage(n, n + 1)), bytes([n]) * 16, is_new=False) for n in range(3)
]


def round_of(
    watch: ProgressWatch, now_s: float, *positions: tuple[int, int], awaited: tuple[bytes, ...] = ()
) -> Finding | None:
    """Asks, and answers for as many stages as there are positions (in, out)."""
    nonce = watch.ask(now_s)
    for stage, (position_in, position_out) in zip(STAGES, positions, strict=False):
        watch.answered(stage.session, Probed(stage.session, nonce, True, 0, position_in, position_out), len(STAGES))
    return watch.judge(STAGES, awaited, 9, 10, now_s)


def test_silence_is_long_after_six_usual_steps() -> None:
    watch = ProgressWatch(SETTINGS, 0.1)
    watch.start(1.0)
    assert watch.wake_s() == 1.0 + 6 * 0.1
    assert not watch.is_silence_long(1.59)
    assert watch.is_silence_long(1.61)
    watch.note_step(60.0)  # counts as a second at most
    watch.on_result(2.0)
    assert watch.wake_s() == 2.0 + 6 * (0.8 * 0.1 + 0.2 * 1.0)


def test_a_round_is_over_when_all_have_answered_this_question() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    old = watch.ask(0.0)
    new = watch.ask(1.0)
    answers = [Probed(stage.session, nonce, True, 0, 0, 0) for nonce in (old, new) for stage in STAGES]
    assert [watch.answered(a.session, a, 3) for a in answers] == [False] * 5 + [True]
    assert not watch.is_time_up(1.49)
    assert watch.is_time_up(1.5)


def test_whoever_does_not_answer_is_silent() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    watch.start(0.0)
    assert round_of(watch, 1.0, (9, 9), (9, 9)) == Finding((STAGES[2],))


def test_a_stall_is_found_only_after_its_time_and_lies_where_positions_stop() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    watch.start(0.0)
    assert round_of(watch, 4.9, (9, 9), (9, 3), (3, 3)) is None
    assert round_of(watch, 5.0, (9, 9), (9, 3), (3, 3)) == Finding(stalled=(None, STAGES[1]))
    assert round_of(watch, 5.0, (9, 9), (9, 9), (3, 3)) == Finding(stalled=(STAGES[1], STAGES[2]))


def test_while_an_epoch_is_formed_the_first_that_has_not_answered_stalls() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    watch.start(0.0)
    awaited = (STAGES[1].session, STAGES[2].session)
    assert round_of(watch, 6.0, (0, 0), (0, 0), (0, 0), awaited=awaited) == Finding(stalled=(None, STAGES[1]))


def test_shards_that_are_fed_may_take_long_as_long_as_they_get_on_but_not_for_ever() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    watch.start(0.0)
    watch.formed(0.0, is_feeding=True)
    for number in range(1, 10):
        assert round_of(watch, 5.0 * number, (number, 0), (0, 0), (0, 0)) is None
    assert round_of(watch, 50.0, (10, 0), (0, 0), (0, 0)) == Finding(stalled=(None, STAGES[0]))


def test_between_the_results_of_a_long_prompt_shards_may_take_long_too() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    watch.start(0.0)
    watch.on_result(1.0, is_feeding=True)
    assert round_of(watch, 5.0, (4, 2), (2, 2), (2, 2)) is None
    assert round_of(watch, 9.9, (4, 3), (3, 2), (2, 2)) is None
    assert round_of(watch, 14.9, (4, 3), (3, 2), (2, 2)) == Finding(stalled=(None, STAGES[0]))
    watch.on_result(15.0)
    assert round_of(watch, 16.0, (5, 5), (5, 5), (5, 4)) is None
    assert round_of(watch, 20.0, (6, 6), (6, 6), (6, 4)) == Finding(stalled=(None, STAGES[0]))


def test_a_timer_that_comes_late_is_believed_once_in_a_row() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    assert not watch.has_slept(1.9)
    assert watch.has_slept(2.1)
    assert not watch.has_slept(2.1)
    assert not watch.has_slept(0.1)
    assert watch.has_slept(9.0)


def test_a_new_epoch_forgets_what_was_asked() -> None:
    watch = ProgressWatch(SETTINGS, 0.0)
    watch.ask(0.0)
    watch.forming(1.0)
    assert not watch.is_probing
