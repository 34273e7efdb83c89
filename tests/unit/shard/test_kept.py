"""Sessions that a shard keeps after their close: for whom, how long, and what begins with them."""

import pytest

from potluck.wire.messages import Close, Opened, Replay, Resume
from potluck.wire.work import CloseSession, OpenSession, SessionOpened
from tests.support.shard_cores import HEAD, MIDDLE, OTHER_HEAD, CoreBench, opening, session_id

OLD, NEW = session_id(1), session_id(2)


def kept(**changes: object) -> CoreBench:
    """A shard that has answered once and keeps it."""
    bench = CoreBench(MIDDLE, keep_s=60.0, **changes)
    bench.open(1)
    bench.run(0, 20)
    bench.tell(HEAD, Close(OLD, keeps=True))
    return bench


def resume(bench: CoreBench, head: bytes = HEAD, length: int = 18) -> Resume | None:
    """What the worker is asked to begin with."""
    bench.tell(head, opening(MIDDLE, 2, resume=Resume(OLD, length)))
    [order] = bench.orders
    assert isinstance(order, OpenSession)
    return order.resume


def test_a_closed_session_is_kept_where_its_head_says_so() -> None:
    bench = kept()
    assert bench.orders == [CloseSession(OLD, keeps=True)]
    assert (bench.core.session_count, bench.core.kept_count) == (0, 1)
    assert bench.core.outbox_bytes == 0


def test_a_session_begins_where_the_worker_says_that_it_does() -> None:
    bench = kept()
    assert resume(bench) == Resume(OLD, 18)
    [opened] = bench.hear(SessionOpened(NEW, 17))
    assert opened.message == Opened(NEW, 0, 17)
    [passed_on] = bench.run(17, 2, session=2)
    assert passed_on.message.position == 17  # type: ignore[union-attr]
    [fault] = bench.tell(HEAD, Replay(NEW, 0, 0, 5))  # what the next shard got before is not here
    assert fault.message.code == "outbox_dropped"  # type: ignore[union-attr]


def test_nobody_resumes_what_another_head_has_asked() -> None:
    assert resume(kept(), OTHER_HEAD) is None


@pytest.mark.parametrize(("waited_s", "is_there"), [(59.0, True), (60.0, False)])
def test_what_is_kept_expires(waited_s: float, is_there: bool) -> None:
    bench = kept()
    bench.core.evict_if_idle(waited_s)
    bench._take()
    assert bench.orders == ([] if is_there else [CloseSession(OLD)])
    bench.now_s = waited_s
    assert (resume(bench) is not None) is is_there


def test_only_so_many_are_kept_and_the_longest_unused_goes() -> None:
    bench = CoreBench(MIDDLE, kept_sessions=2)
    for number in (1, 2, 3):
        bench.open(number)
        bench.tell(HEAD, Close(session_id(number), keeps=True))
        if number == 2:
            assert bench.orders == [CloseSession(NEW, keeps=True)]
            bench.tell(HEAD, opening(MIDDLE, 9, resume=Resume(OLD, 5)))  # the first is used once more
            bench.tell(HEAD, Close(session_id(9)))
    assert bench.orders == [CloseSession(session_id(3), keeps=True), CloseSession(NEW)]


def test_a_shard_that_keeps_nothing_frees_at_once() -> None:
    assert kept(kept_sessions=0).orders == [CloseSession(OLD)]


def test_what_is_kept_goes_with_its_head() -> None:
    bench = kept()
    bench.lose_node(OTHER_HEAD)
    assert bench.orders == []
    bench.lose_node(HEAD)
    assert bench.orders == [CloseSession(OLD)]
    assert bench.core.kept_count == 0


@pytest.mark.parametrize("how", ["lost", "evicted"])
def test_what_is_kept_goes_with_the_worker(how: str) -> None:
    bench = kept()
    if how == "lost":
        bench.lose_worker()
    else:
        bench.core.evict()
    assert bench.core.kept_count == 0


def test_a_session_that_never_opened_leaves_nothing_to_keep() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE, 1))
    bench.tell(HEAD, Close(OLD, keeps=True))
    assert bench.orders == [CloseSession(OLD)]
    assert bench.core.kept_count == 0
