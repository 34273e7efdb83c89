"""What a shard foresees is what it decides when that comes, and where it could decide otherwise it foresees nothing.

Every test of the core checks the former as well: `CoreBench` compares at each message.
"""

import msgspec
import pytest

from potluck.shard.foresight import ForeseenAnswer, ForeseenArrival
from potluck.shard.sessions import ClosedSessions
from potluck.wire.frames import URGENT_BYTES
from potluck.wire.messages import Close, Credit, Neighbour, Rewire, Stage, Truncate
from potluck.wire.spent import MAX_STAGES, SPENT_BYTES, read_spent
from potluck.wire.work import BatchDone, WorkOutput
from tests.support.shard_cores import (
    AFTER,
    BEFORE,
    FIRST,
    HEAD,
    LAST,
    MIDDLE,
    ROW_BYTES,
    WHOLE,
    CoreBench,
    sampler_of,
    session_id,
    wiring_of,
)

S = session_id(1)


def decoding(stage: Stage, *, ring: bool = True, tokens: int = 16, **changes: object) -> CoreBench:
    """One session whose prompt has gone through."""
    bench = CoreBench(stage)
    bench.open(**{"wiring": wiring_of(stage, ring=ring), **changes})
    if stage.has_output and ring:
        bench.tell(HEAD, Credit(S, 0, tokens))
    bench.run(0, 4)
    return bench


def arrival(bench: CoreBench) -> ForeseenArrival:
    foreseen = bench.core.foresight.next()
    assert isinstance(foreseen, ForeseenArrival)
    return foreseen


def answer(bench: CoreBench) -> ForeseenAnswer:
    foreseen = bench.core.foresight.next()
    assert isinstance(foreseen, ForeseenAnswer)
    return foreseen


@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST])
def test_token_after_token_all_is_foreseen(stage: Stage) -> None:
    bench = decoding(stage)
    sender = BEFORE if stage is not FIRST else AFTER
    for position in range(4, 12):
        foreseen = arrival(bench)
        assert (foreseen.sender, foreseen.step.position) == (sender, position)
        bench.tell(sender, foreseen.step, bytes(foreseen.body_bytes))
        assert bench.orders == [foreseen.batch]
        then = answer(bench)
        assert then.node == (AFTER if stage is not LAST else BEFORE)
        bench.done(bench.batch)
    assert bench.foreseen == 16


def test_without_a_ring_the_first_shard_hears_from_the_head_and_the_last_tells_it() -> None:
    first, last = decoding(FIRST, ring=False), decoding(LAST, ring=False)
    assert (arrival(first).sender, arrival(first).step.source) == (HEAD, None)
    last.step(4)
    assert last.core.foresight.next() is None, "a result tells more than can be known"


def test_a_remote_prefix_sends_the_head_what_it_computed() -> None:
    bench = decoding(FIRST, wiring=msgspec.structs.replace(wiring_of(FIRST), next=None))
    bench.step(4)
    foreseen = answer(bench)
    assert (foreseen.node, foreseen.address, foreseen.step.session) == (HEAD, None, S)
    assert bench.done(bench.batch)[0].node == HEAD


@pytest.mark.parametrize("size", [0, 5, 8, 13, 40, 511, 512])
def test_it_knows_how_many_shards_will_have_told_their_times(size: int) -> None:
    bench = decoding(MIDDLE)
    bench.step(4, spent=bytes(size))
    stages = answer(bench).stages
    assert stages == min(size // SPENT_BYTES + 1, MAX_STAGES)
    [sent] = bench.done(bench.batch)
    assert len(sent.message.spent) == stages * SPENT_BYTES  # type: ignore[union-attr]
    assert arrival(bench).stages == size // SPENT_BYTES


def test_times_are_those_that_the_core_tells() -> None:
    bench = decoding(MIDDLE)
    bench.now_s = 5.0
    bench.step(4)
    foreseen, batch = answer(bench), bench.batch
    done = BatchDone(batch.batch, (WorkOutput(S, ROW_BYTES, None, None, (), "", ""),), 700)
    numbers = foreseen.numbers(done, bytes(ROW_BYTES), 5.001)
    assert numbers is not None
    [spent] = read_spent(numbers[0])
    assert spent.compute_us == 700
    assert spent.queue_us in (299, 300)
    bench.now_s = 5.001
    assert bench.hear(done, bytes(ROW_BYTES)) == [foreseen.decision(*numbers)]


# ---------------------------------------------------------------- where nothing is foreseen


@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST])
def test_nothing_beside_a_second_session(stage: Stage) -> None:
    bench = decoding(stage)
    bench.open(2)
    assert bench.core.foresight.next() is None


def test_nothing_before_the_prompt_or_during_it() -> None:
    bench = CoreBench(MIDDLE)
    assert bench.core.foresight.next() is None
    bench.open()
    assert bench.core.foresight.next() is None
    bench.step(0, 4)
    assert bench.core.foresight.next() is None


def test_nothing_past_what_was_reserved() -> None:
    bench = decoding(MIDDLE, positions=5)
    bench.run(4)
    assert bench.core.foresight.next() is None


def test_a_step_that_waits_behind_the_one_that_is_computed_is_in_nobodys_way() -> None:
    bench = decoding(MIDDLE)
    bench.step(4)
    batch = bench.batch
    bench.step(5)
    foreseen = answer(bench)
    sent = bench.done(batch)
    assert [effect.message.position for effect in sent] == [4]  # type: ignore[union-attr]
    assert foreseen.step.position == 4
    assert isinstance(bench.core.foresight.next(), ForeseenAnswer), "the next batch is with the worker already"


def test_nothing_after_a_failed_step_or_a_cut() -> None:
    bench = decoding(MIDDLE)
    bench.step(4)
    batch = bench.batch
    bench.tell(HEAD, Truncate(S, 0, 2))
    assert bench.core.foresight.next() is None, "what the worker computes is void"
    bench.done(batch)
    assert arrival(bench).step.position == 2
    bench.step(2)
    bench.done(bench.batch, code="shard_corruption", text="NaN")
    assert bench.core.foresight.next() is None


def test_nothing_of_a_session_whose_id_another_one_has_taken() -> None:
    bench = decoding(MIDDLE)
    bench.step(4)
    bench.tell(HEAD, Close(S))
    bench.core._life.closed = ClosedSessions()  # so many others have ended since
    bench.open()
    assert bench.core.foresight.next() is None


def test_nothing_until_the_worker_knows_the_new_epochs_sampler() -> None:
    bench = decoding(LAST)
    bench.tell(HEAD, Rewire(S, 1, 4, wiring_of(LAST, ring=True), sampler_of()))
    assert bench.core.foresight.next() is None
    bench.tell(HEAD, Credit(S, 1, 4))
    bench.run(4, epoch=1)
    assert arrival(bench).step.epoch == 1


def test_no_token_goes_round_without_credit_or_past_the_limit() -> None:
    without = decoding(LAST, tokens=1)
    without.step(4)  # the prompt's token has taken the credit
    assert without.core.foresight.next() is None
    short = decoding(LAST, sampler=sampler_of(limit=6))
    short.step(4)
    assert short.core.foresight.next() is None


def test_the_end_of_the_text_does_not_go_round() -> None:
    bench = decoding(LAST)
    bench.step(4)
    done = BatchDone(bench.batch.batch, (WorkOutput(S, 0, 99, None, (), "", ""),), 5)
    assert answer(bench).numbers(done, b"", 0.0) is None
    assert answer(bench).numbers(msgspec.structs.replace(done, batch=77), b"", 0.0) is None


def test_an_answer_of_another_kind_is_not_the_foreseen_one() -> None:
    bench = decoding(MIDDLE)
    bench.step(4)
    foreseen, number = answer(bench), bench.batch.batch
    good = WorkOutput(S, ROW_BYTES, None, None, (), "", "")
    failed = msgspec.structs.replace(good, code="shard_corruption", message="NaN")
    assert foreseen.numbers(BatchDone(number, (good,), 5), bytes(ROW_BYTES), 0.0) is not None
    for outputs, body in (((failed,), b""), ((), b""), ((good, good), bytes(ROW_BYTES)), ((good,), b"short")):
        assert foreseen.numbers(BatchDone(number, outputs, 5), body, 0.0) is None


def test_where_a_head_names_two_neighbours_it_is_the_one_that_may_feed() -> None:
    wiring = msgspec.structs.replace(wiring_of(MIDDLE), ring_from=Neighbour(AFTER, session_id(1001)))
    bench = decoding(MIDDLE, wiring=wiring)
    foreseen = arrival(bench)
    assert foreseen.sender == BEFORE
    bench.tell(foreseen.sender, foreseen.step, bytes(ROW_BYTES))
    assert bench.work == [foreseen.decision(bytes(ROW_BYTES))]


def test_a_shard_that_is_its_own_next_foresees_no_token() -> None:
    bench = CoreBench(WHOLE)
    bench.open(wiring=wiring_of(WHOLE, ring=True))
    bench.tell(HEAD, Credit(S, 0, 16))
    bench.run(0, 4)
    assert bench.core.foresight.next() is None


def test_rows_too_large_for_one_frame_are_not_foreseen() -> None:
    bench = CoreBench(MIDDLE)
    bench.core._life._row_bytes = lambda codec, rows, width: (URGENT_BYTES + 4) * rows
    bench.open()
    size = URGENT_BYTES + 4
    bench.core._sessions[S].length_in = 4
    assert bench.core._sessions[S].input_row_bytes == size
    assert bench.core.foresight.next() is None
