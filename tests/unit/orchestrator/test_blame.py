"""Who goes after a complaint, and who may come back."""

from potluck.orchestrator.blame import Blame
from potluck.orchestrator.recovery import HeadStage
from potluck.planner.cover import Placed
from potluck.wire.messages import Stage


def stages_of(*numbers: int) -> list[HeadStage]:
    return [
        HeadStage(Placed(bytes([number]) * 32, f"node:{number}", Stage(index, index + 1)), bytes([index]) * 16)
        for index, number in enumerate(numbers)
    ]


def test_rubbish_is_the_stage_befores_fault_once_and_both_go_the_second_time() -> None:
    blame, (first, second, third) = Blame(), stages_of(1, 2, 3)
    assert blame.of_rubbish(second, [first], [first, second, third]) == [first]
    assert blame.of_rubbish(second, [first], [first, second, third]) == [first, second]


def test_who_accuses_somebody_it_cannot_have_heard_goes_itself() -> None:
    blame, stages = Blame(), stages_of(1, 2, 3)
    assert blame.of_rubbish(stages[2], [stages[0]], stages) == [stages[2]]
    blame.forgive()
    assert blame.excluded == frozenset()  # nobody is distrusted for that


def test_who_reports_one_loss_after_another_is_doubted_unless_the_head_has_found_it_so_itself() -> None:
    blame, (first, second, third) = Blame(), stages_of(1, 2, 3)
    assert not blame.is_doubtful(second, [first])
    assert not blame.is_doubtful(third, [first])  # another's word is its own
    blame.confirm(first.placed.node)
    assert not blame.is_doubtful(second, [third])
    assert blame.is_doubtful(second, [first])


def test_of_two_that_disagree_the_giver_goes_first_and_then_the_taker() -> None:
    blame, (giver, taker, other) = Blame(), stages_of(1, 2, 3)
    assert blame.of_two(giver, taker) is giver
    assert blame.of_two(other, taker) is taker


def test_whoever_failed_may_come_back_and_a_liar_never() -> None:
    blame, (weak, liar) = Blame(), [bytes([1]) * 32, bytes([2]) * 32]
    blame.exclude([weak, liar])
    blame.distrust(liar)
    blame.returned(weak)
    blame.returned(liar)
    assert blame.excluded == {liar}
    blame.exclude([weak])
    blame.forgive()
    assert blame.excluded == {liar}
