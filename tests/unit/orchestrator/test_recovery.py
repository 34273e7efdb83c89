"""Which stages start empty and who feeds them: checked against what a feed must achieve, for every pattern of losses."""

import itertools

import pytest

from potluck.orchestrator.recovery import Feed, HeadStage, plan_rebuild, spread_emptiness
from potluck.planner.cover import Placed
from potluck.wire.messages import Stage


def stages(pattern: str) -> list[HeadStage]:
    """One letter for each stage: `k` kept with an outbox, `d` kept without, `e` empty."""
    made = []
    for index, letter in enumerate(pattern):
        stage = HeadStage(Placed(bytes([index]) * 32, "", Stage(index, index + 1)), bytes([index]) * 16)
        stage.is_empty, stage.has_outbox = letter == "e", letter != "d"
        made.append(stage)
    return made


def planned(pattern: str, resume: int = 7) -> tuple[str, list[Feed], list[int]]:
    made = stages(pattern)
    spread_emptiness(made)
    plan = plan_rebuild(made, resume)
    return "".join("e" if stage.is_empty else "k" for stage in made), plan.feeds, plan.forward_from


@pytest.mark.parametrize(
    ("pattern", "empty", "feeds", "forward_from"),
    [
        ("kkk", "kkk", [], [7, 7, 7]),
        ("kek", "kek", [Feed(0, 1, 1)], [0, 7, 7]),
        ("ekk", "ekk", [Feed(None, 0, 0)], [7, 7, 7]),
        ("kke", "kke", [Feed(1, 2, 2)], [7, 0, 7]),
        ("keek", "keek", [Feed(0, 1, 2)], [0, 0, 7, 7]),
        ("eee", "eee", [Feed(None, 0, 2)], [0, 0, 7]),
        ("ekek", "ekek", [Feed(None, 0, 0), Feed(1, 2, 2)], [7, 0, 7, 7]),
        ("kde", "kee", [Feed(0, 1, 2)], [0, 0, 7]),
        ("dde", "eee", [Feed(None, 0, 2)], [0, 0, 7]),
        ("dek", "eek", [Feed(None, 0, 1)], [0, 7, 7]),
        ("ddk", "kkk", [], [7, 7, 7]),  # nobody needs their outboxes
    ],
)
def test_named_patterns(pattern: str, empty: str, feeds: list[Feed], forward_from: list[int]) -> None:
    assert planned(pattern) == (empty, feeds, forward_from)


def test_at_the_very_beginning_nothing_has_to_be_fed() -> None:
    assert planned("eee", resume=0) == ("eee", [], [0, 0, 0])


EVERY_PATTERN = ["".join(p) for n in range(1, 6) for p in itertools.product("kde", repeat=n)]


@pytest.mark.parametrize("pattern", EVERY_PATTERN)
def test_every_stage_gets_every_position_once_and_in_order(pattern: str) -> None:
    """Carries out the plan on counters: `has[i]` positions of stage i; a stage passes on what lies at or past forward_from."""
    resume = 7
    made = stages(pattern)
    recomputed = spread_emptiness(made)
    plan = plan_rebuild(made, resume)
    has = [0 if stage.is_empty else resume for stage in made]

    def receive(index: int, position: int) -> None:
        if index == len(made):
            return
        assert position == has[index], f"stage {index} gets {position}, and expects {has[index]}"
        has[index] += 1
        if position >= plan.forward_from[index]:
            receive(index + 1, position)

    for feed in plan.feeds:
        if feed.source is not None:
            assert not made[feed.source].is_empty
            assert made[feed.source].has_outbox
        for position in range(resume):
            receive(0 if feed.source is None else feed.source + 1, position)
    assert has == [resume] * len(made)
    receive(0, resume)  # and the next token goes all the way
    assert has == [resume + 1] * len(made)
    # No stage is recomputed that need not be: the one after it is empty and cannot be fed otherwise.
    for index in recomputed:
        assert made[index + 1].is_empty
        assert not made[index].has_outbox


@pytest.mark.parametrize("pattern", EVERY_PATTERN)
def test_a_source_that_was_not_told_to_replay_yet_can_tell_what_it_owes(pattern: str) -> None:
    """The next token comes to every source before its order. `passed_on[i]`: below that stage i has nothing to send any more."""
    resume = 7
    made = stages(pattern)
    spread_emptiness(made)
    plan = plan_rebuild(made, resume)
    has, passed_on = [0 if stage.is_empty else resume for stage in made], list(plan.forward_from)

    def receive(index: int, position: int) -> None:
        assert position == has[index], f"stage {index} gets {position}, and expects {has[index]}"
        has[index] += 1
        if index + 1 < len(made):
            for due in range(passed_on[index], position + 1):
                passed_on[index] = due + 1
                receive(index + 1, due)

    for feed in plan.feeds:
        for position in range(resume if feed.source is None else 0):
            receive(0, position)
    receive(0, resume)
    assert has == [resume + 1] * len(made)
