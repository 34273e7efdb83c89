"""The core's parts alone: which steps go together, whether the weights are there, and which step fits a session."""

from collections import OrderedDict

from potluck.shard.batching import Batches
from potluck.shard.effects import Effects, Work
from potluck.shard.residency import Residency
from potluck.shard.sessions import ClosedSessions, Phase, ShardSession, Waiting
from potluck.wire.messages import Step
from potluck.wire.work import Load, RunBatch, Unload
from tests.support.shard_cores import FIRST, HEAD, opening, session_id


def session_with(number: int, *counts: int) -> ShardSession:
    session = ShardSession.of(opening(FIRST, number), HEAD)
    session.phase = Phase.ACTIVE
    for count in counts:
        step = Step(session.id, 0, session.length_in, count, 0, None, True)
        session.waiting.append(Waiting(step, bytes(4 * count), 0.0))
        session.length_in += count
    return session


class Desk:
    """Batches with a worker that is loaded unless told otherwise."""

    def __init__(self, *sessions: ShardSession, is_loaded: bool = True) -> None:
        self.effects = Effects()
        self.residency = Residency(FIRST, self.effects, 600.0)
        self.residency.is_loaded = is_loaded
        self.batches = Batches(self.effects, self.residency, batch_tokens=8)
        self.sessions = OrderedDict((session.id, session) for session in sessions)
        for session in sessions:
            self.batches.wait(session)

    def started(self) -> list[list[bytes]]:
        """The sessions of each batch that a start leads to."""
        self.batches.start(self.sessions)
        items, self.effects.items = self.effects.items, []
        orders = [item.message for item in items if isinstance(item, Work)]
        return [[item.session for item in order.items] for order in orders if isinstance(order, RunBatch)]

    def finish(self, compute_us: int) -> None:
        """The worker is done with the first batch that it has."""
        batch = self.batches.running.pop(min(self.batches.running))
        self.batches.note(batch, compute_us)
        for running in batch:
            running.session.batches_running -= 1
            if running.session.waiting:
                self.batches.wait(running.session)


def test_a_batch_has_its_share_of_decodes_and_prompts_up_to_their_limit() -> None:
    one, two, three, four, five, six = (session_with(number, 1) for number in range(1, 7))
    long, longer, short = session_with(7, 6), session_with(8, 7), session_with(9, 2)
    desk = Desk(long, one, two, longer, three, four, short, five, six)
    # Nine sessions over three shards: three tokens; prompts of 6 + 2, and 7 more would be too much.
    assert desk.started() == [[long.id, one.id, two.id, three.id, short.id]]
    assert desk.started() == []  # one at a time
    desk.batches.running.clear()
    assert desk.started() == [[longer.id, four.id, five.id, six.id]]


def test_a_prompt_longer_than_the_limit_goes_alone_among_prompts() -> None:
    huge, other = session_with(1, 20), session_with(2, 2)
    assert Desk(huge, other).started() == [[huge.id]]


def test_the_next_chunk_of_the_only_prompt_waits_in_the_worker_if_not_for_long() -> None:
    session = session_with(1, 4, 4, 4, 4, 1)
    desk, batch = Desk(session), [session.id]
    assert desk.started() == [batch], "how long it takes is not known yet"
    desk.finish(40_000)
    assert desk.started() == [batch, batch], "one to compute, and one in hand"
    assert desk.started() == [], "and no third"
    desk.finish(52_000)
    assert desk.started() == [], "the next one would take too long"
    desk.finish(40_000)
    assert desk.started() == [batch]
    desk.finish(40_000)
    assert desk.started() == [batch], "the token that comes last"
    assert not session.waiting


def test_a_token_does_not_wait_in_the_worker_behind_its_own_prompt() -> None:
    session = session_with(1, 4, 4, 1)
    desk, batch = Desk(session), [session.id]
    desk.started()
    desk.finish(4)
    assert desk.started() == [batch]
    assert desk.started() == []


def test_with_others_about_no_chunk_waits_in_the_worker() -> None:
    prompt, other = session_with(1, 4, 4, 4, 4), session_with(2)
    desk = Desk(prompt)
    desk.started()
    desk.finish(4)
    desk.sessions[other.id] = other
    assert desk.started() == [[prompt.id]]
    assert desk.started() == []


def test_nothing_starts_without_the_weights_and_what_is_dropped_does_not_start() -> None:
    session = session_with(1, 1)
    desk = Desk(session, is_loaded=False)
    assert desk.started() == []
    desk.residency.is_loaded = True
    desk.batches.drop(session.id)
    assert desk.started() == []


def test_weights_are_asked_for_once_and_those_who_wait_are_told() -> None:
    effects = Effects()
    residency = Residency(FIRST, effects, 10.0)
    early, late = session_with(1), session_with(2)
    residency.postpone(early)
    residency.postpone(late)
    assert effects.items == [Work(Load(FIRST))]
    assert residency.withdraw(early)
    assert not residency.withdraw(early)
    assert residency.loaded(500, now_s=3.0) == [late]
    assert residency.loaded(500, now_s=3.0) == []
    assert not residency.is_unused(12.9)
    assert residency.is_unused(13.0)
    residency.unload()
    assert effects.items[-1] == Work(Unload(FIRST))


def test_a_worker_that_is_lost_is_loading_again_by_itself() -> None:
    effects = Effects()
    residency = Residency(FIRST, effects, 10.0)
    residency.lost()
    residency.load()
    assert residency.is_loading
    assert effects.items == []
    assert residency.failed() == []
    residency.load()
    assert effects.items == [Work(Unload(FIRST)), Work(Load(FIRST))]


def test_the_usual_step_follows_slowly() -> None:
    residency = Residency(FIRST, Effects(), 10.0)
    residency.note_step(800)
    assert residency.step_us == 800
    residency.note_step(1600)
    assert residency.step_us == 900


def test_only_the_last_few_that_closed_are_remembered() -> None:
    closed = ClosedSessions(most=2)
    for number in (1, 2, 3):
        closed.add(session_id(number))
    assert [session_id(number) in closed for number in (1, 2, 3)] == [False, True, True]


def test_a_step_fits_or_the_session_says_why_not() -> None:
    session = session_with(1, 2)
    step = Step(session.id, 0, 2, 1, 0, None, True)
    assert session.problem_with(step, bytes(4), most_waiting=2) is None
    assert session.problem_with(step, bytes(5), most_waiting=2) == "5 bytes for 1 positions, expected 4"
    assert session.problem_with(step, bytes(4), most_waiting=1) == "more than 1 steps are waiting"
