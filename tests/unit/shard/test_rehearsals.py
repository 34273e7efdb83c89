"""Rehearsals: sent to whoever is next, just before a token is done; taken without any effect."""

import pytest

from potluck.wire.messages import Step
from potluck.wire.work import Loaded, Rehearse, RunBatch
from tests.support.shard_cores import AFTER, BEFORE, LAST, MIDDLE, ROW_BYTES, WHOLE, CoreBench, session_id, wiring_of

LEAD_S = 0.002


def working(stage: object = MIDDLE, **changes: object) -> tuple[CoreBench, RunBatch]:
    """A core whose worker takes 10 ms for a token, and has one."""
    bench = CoreBench(stage, rehearsal_lead_s=LEAD_S)  # type: ignore[arg-type]
    bench.hear(Loaded(stage, 0, 0, 10_000))  # type: ignore[arg-type]
    bench.open(**changes)
    bench.step(0)
    return bench, bench.batch


def rehearsed(bench: CoreBench, batch: int) -> list[Step]:
    bench.core.rehearsals.send(batch)
    bench.take()
    return [message for message in bench.messages if isinstance(message, Step)]


def test_it_goes_out_shortly_before_the_worker_is_expected_to_be_done() -> None:
    bench, batch = working()
    assert bench.core.rehearsals.due_in_s() == pytest.approx(0.008)
    [step] = rehearsed(bench, batch.batch)
    assert step.is_rehearsal
    [sent] = bench.sent
    assert (sent.node, len(sent.body)) == (AFTER, ROW_BYTES)
    bench.done(batch)
    [real] = [message for message in bench.messages if isinstance(message, Step)]
    assert (real.session, real.epoch, real.position, real.count, real.layer, real.codec, real.source) == (
        step.session, step.epoch, step.position, step.count, step.layer, step.codec, step.source,
    )  # fmt: skip


def test_there_is_none_where_it_is_switched_off_or_steps_are_too_short() -> None:
    assert CoreBench(MIDDLE).core.rehearsals.due_in_s() is None
    bench, _ = working()
    bench.hear(Loaded(MIDDLE, 0, 0, 500))
    assert bench.core.rehearsals.due_in_s() is None


def test_where_cores_are_few_only_long_steps_have_one() -> None:
    bench = CoreBench(MIDDLE, rehearsal_lead_s=LEAD_S, rehearsal_shortest_s=0.003)
    bench.open()
    bench.hear(Loaded(MIDDLE, 0, 0, 2_900))
    assert bench.core.rehearsals.due_in_s() is None
    bench.hear(Loaded(MIDDLE, 0, 0, 3_100))
    assert bench.core.rehearsals.due_in_s() == pytest.approx(0.0011)


def test_it_goes_out_at_once_where_a_step_is_hardly_longer_than_its_way() -> None:
    bench, _ = working()
    bench.hear(Loaded(MIDDLE, 0, 0, 1_500))
    assert bench.core.rehearsals.due_in_s() == 0.0


def test_there_is_none_beside_a_second_session() -> None:
    bench, batch = working()
    bench.open(2)
    assert bench.core.rehearsals.due_in_s() is None
    assert rehearsed(bench, batch.batch) == []


def test_there_is_none_for_what_is_done_already_or_for_a_prompt() -> None:
    bench, batch = working()
    bench.done(batch)
    assert rehearsed(bench, batch.batch) == []
    bench.step(1, 3)
    assert rehearsed(bench, bench.batch.batch) == []


def test_the_last_shard_wakes_the_first_one_of_the_ring() -> None:
    bench, batch = working(LAST, wiring=wiring_of(LAST, ring=True))
    [step] = rehearsed(bench, batch.batch)
    assert (step.position, step.layer, step.codec, step.is_rehearsal) == (1, 0, None, True)
    [sent] = bench.sent
    assert (sent.node, len(sent.body)) == (BEFORE, 4)


@pytest.mark.parametrize("stage", [LAST, WHOLE])
def test_without_a_ring_the_last_shard_has_nobody_to_wake(stage: object) -> None:
    bench, batch = working(stage)
    assert rehearsed(bench, batch.batch) == []


def test_the_worker_is_told_and_the_session_is_as_before() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0, is_rehearsal=True)
    [order] = bench.orders
    assert isinstance(order, Rehearse)
    assert bench.sent == []
    bench.step(0)
    assert bench.batch.items == (order.item,)
    assert bench.core.counters == {}


def test_where_another_workers_core_would_be_taken_for_it_only_the_daemon_is_woken() -> None:
    bench = CoreBench(MIDDLE, rehearsal_reaches_worker=False)
    bench.open()
    bench.step(0, is_rehearsal=True)
    assert (bench.orders, bench.sent) == ([], [])
    bench.step(0)
    assert len(bench.batch.items) == 1
    assert bench.core.counters == {}


def test_while_the_worker_computes_it_is_dropped() -> None:
    bench, _ = working()
    bench.step(1, is_rehearsal=True)
    assert (bench.orders, bench.sent) == ([], [])


@pytest.mark.parametrize(
    "changes", [{"position": 3}, {"layer": 1}, {"codec": "int8"}, {"epoch": 1}, {"source": session_id(77)}], ids=str
)
def test_one_that_does_not_fit_harms_nobody(changes: dict[str, object]) -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    position = changes.pop("position", 0)
    bench.step(position, is_rehearsal=True, **changes)  # type: ignore[arg-type]
    assert (bench.orders, bench.sent) == ([], [])


def test_a_stranger_cannot_rehearse() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0, sender=b"x" * 32, is_rehearsal=True)
    assert bench.orders == []
    assert bench.core.counters["not_a_neighbour"] == 1
