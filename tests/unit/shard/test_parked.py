"""Sessions that end with their KV kept: who may resume them, what becomes of them, and that they are in nobody's way."""

import pytest

from potluck.wire.messages import Close, Opened, Refused, Replay, Stage, Step
from potluck.wire.work import CloseSession, OpenSession, ParkSession, SessionOpened, Unload
from tests.support.shard_cores import (
    AFTER,
    FIRST,
    HEAD,
    LAST,
    OTHER_HEAD,
    ROW_BYTES,
    CoreBench,
    boundary,
    opening,
    session_id,
)


def parked_bench(stage: Stage = FIRST, length: int = 6, **changes: object) -> CoreBench:
    """A core whose session 1 has ended with `length` positions kept."""
    bench = CoreBench(stage, **changes)
    bench.open(1)
    bench.run(0, length)
    bench.tell(HEAD, Close(session_id(1), length))
    return bench


def resume(bench: CoreBench, session: int = 2, head: bytes = HEAD, **changes: object) -> OpenSession:
    values = {"resumes": session_id(1), "resumed": 4} | changes
    bench.tell(head, opening(bench.stage, session, **values))
    [order] = [each for each in bench.orders if isinstance(each, OpenSession)]
    return order


def test_a_session_that_ends_with_its_kv_kept_takes_no_stream() -> None:
    bench = parked_bench(max_concurrent_streams=1)
    assert bench.orders == [ParkSession(session_id(1), 6)]
    assert bench.core.state.streams == 0
    assert bench.core.has_parked(session_id(1))
    bench.tell(OTHER_HEAD, opening(FIRST, 7))
    assert not [m for m in bench.messages if isinstance(m, Refused)]


def test_its_head_goes_on_where_it_ended() -> None:
    bench = parked_bench()
    order = resume(bench)
    assert (order.resumes, order.resumed) == (session_id(1), 4)
    assert bench.hear(SessionOpened(session_id(2), 4))[0].message == Opened(session_id(2), 0, 4)
    bench.step(4, 2, session=2)
    assert bench.batch.items[0].position == 4


def test_what_it_had_sent_is_replayed_for_the_one_that_goes_on() -> None:
    bench = parked_bench()
    resume(bench)
    bench.hear(SessionOpened(session_id(2), 4))
    bench.tell(HEAD, Replay(session_id(2), 0, 0, 4))
    [effect] = bench.sent
    assert isinstance(effect.message, Step)
    assert (effect.node, effect.message.position, effect.message.count, len(effect.body)) == (
        AFTER,
        0,
        4,
        4 * ROW_BYTES,
    )


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        (OTHER_HEAD, {}),
        (HEAD, {"resumes": session_id(9)}),
        (HEAD, {"resumed": 7}),
        (HEAD, {"resumed": 0}),
        (HEAD, {"boundaries": (boundary(2, "int8"),)}),
        (HEAD, {"stage": Stage(0, 2, True)}),
    ],
)
def test_nobody_else_gets_it_and_nothing_that_was_computed_otherwise(head: bytes, changes: dict[str, object]) -> None:
    order = resume(parked_bench(), head=head, **changes)
    assert (order.resumes, order.resumed) == (None, 0)


def test_where_the_worker_has_given_it_up_everything_begins_anew() -> None:
    bench = parked_bench()
    resume(bench)
    assert bench.hear(SessionOpened(session_id(2)))[0].message == Opened(session_id(2), 0, 0)
    bench.step(0, 2, session=2)
    assert bench.batch.items[0].position == 0


def test_the_oldest_makes_room_and_time_ends_all() -> None:
    bench = parked_bench(parked_sessions=1, eviction_idle_s=10.0)
    bench.now_s = 5.0
    bench.open(2)
    bench.run(0, 3, session=2)
    bench.tell(HEAD, Close(session_id(2), 3))
    assert bench.orders == [ParkSession(session_id(2), 3), CloseSession(session_id(1))]
    bench.core.evict_if_idle(14.0)
    bench.take()
    assert bench.orders == []
    bench.core.evict_if_idle(15.0)
    bench.take()
    assert bench.orders == [CloseSession(session_id(2)), Unload(FIRST)]
    assert bench.core.outbox_bytes == 0


@pytest.mark.parametrize("how", ["closed again", "head lost", "worker lost"])
def test_it_goes_with_its_head_or_its_worker_or_when_told(how: str) -> None:
    bench = parked_bench()
    if how == "closed again":
        bench.tell(OTHER_HEAD, Close(session_id(1)))
        assert bench.core.has_parked(session_id(1))
        bench.tell(HEAD, Close(session_id(1)))
    elif how == "head lost":
        bench.lose_node(HEAD)
    else:
        bench.lose_worker()
    assert not bench.core.has_parked(session_id(1))
    assert bench.core.outbox_bytes == 0
    assert bench.orders == ([] if how == "worker lost" else [CloseSession(session_id(1))])


def test_a_shard_that_is_being_given_up_keeps_nothing() -> None:
    bench = CoreBench(LAST)
    bench.open(1)
    bench.core.is_draining = True
    bench.tell(HEAD, Close(session_id(1), 4))
    assert bench.orders == [CloseSession(session_id(1))]


def test_a_parked_session_is_not_opened_a_second_time_however_many_have_ended_since() -> None:
    bench = parked_bench()
    for number in range(2000, 2000 + 1100):  # more than are remembered as closed
        bench.core._life.closed.add(session_id(number))
    bench.tell(HEAD, opening(FIRST, 1))
    assert bench.orders == []
    assert bench.core.counters["duplicate_open"] == 1
