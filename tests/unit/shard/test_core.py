"""The shard's decisions, driven by hand: what is refused, what is batched, what a new epoch does, what is left at the end."""

from collections import deque

import msgspec
import pytest

from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Close,
    Credit,
    Fault,
    Hop,
    Message,
    Neighbour,
    Opened,
    Probe,
    Probed,
    Refused,
    Replay,
    Result,
    Rewire,
    Rewired,
    Stage,
    Step,
    Truncate,
    Wiring,
)
from potluck.wire.spent import MAX_STAGES, SPENT_BYTES
from potluck.wire.work import (
    BatchDone,
    CloseSession,
    Load,
    Loaded,
    LoadFailed,
    OpenSession,
    RunBatch,
    SessionOpened,
    SessionRefused,
    TruncateSession,
    Unload,
    WorkOutput,
)
from tests.support.shard_cores import (
    AFTER,
    BEFORE,
    BEHIND,
    FIRST,
    HEAD,
    LAST,
    MIDDLE,
    OTHER_HEAD,
    ROW_BYTES,
    SHARD,
    STRANGER,
    WHOLE,
    CoreBench,
    boundary,
    every_message,
    opening,
    sampler_of,
    session_id,
    wiring_of,
)

S = session_id(1)


def rewire(epoch: int, length: int, wiring: Wiring, sampler: object = None) -> Rewire:
    return Rewire(S, epoch, length, wiring, sampler)  # type: ignore[arg-type]


# ---------------------------------------------------------------- opening


def test_open_reserves_in_the_worker_and_answers_when_it_has() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE))
    assert bench.orders == [OpenSession(S, MIDDLE, 32, (), None)]
    assert bench.sent == []
    bench.hear(SessionOpened(S))
    assert [(e.node, e.message) for e in bench.sent] == [(HEAD, Opened(S, 0))]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model": "another", "weights_sha256": "b" * 64}, "bad_request", "serves m, not another"),
        ({"weights_sha256": "b" * 64}, "weights_mismatch", "other weights"),
        ({"arithmetic": 2}, "weights_mismatch", "arithmetic 1, not 2"),
        ({"stage": Stage(2, 6)}, "shard_unavailable", "layers 2-5 are not served here"),
        ({"stage": Stage(3, 7)}, "shard_unavailable", "layers 3-6 are not served here"),
        ({"stage": Stage(5, 4)}, "shard_unavailable", "not served here"),
        ({"stage": Stage(3, 6, True)}, "shard_unavailable", "not served here"),
        ({"stage": Stage(3, 6, False, True), "sampler": sampler_of()}, "shard_unavailable", "not served here"),
        ({"positions": 0}, "bad_request", "room for a position"),
    ],
)
def test_open_is_refused(changes: dict[str, object], code: str, words: str) -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE, **changes))
    [refusal] = bench.messages
    assert isinstance(refusal, Refused)
    assert (refusal.session, refusal.epoch, refusal.code) == (S, 0, code)
    assert words in refusal.message
    assert bench.orders == []
    assert bench.core.session_count == 0
    assert bench.core.counters[f"refused_{code}"] == 1


def test_the_same_weights_under_another_name_are_the_same_model() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE, model="another"))
    assert bench.orders == [OpenSession(S, MIDDLE, 32, (), None)]


def test_a_stage_with_the_output_needs_a_sampler() -> None:
    bench = CoreBench(LAST)
    bench.tell(HEAD, opening(LAST, sampler=None))
    assert [m.code for m in bench.messages if isinstance(m, Refused)] == ["bad_request"]


def test_part_of_a_loaded_shard_can_be_opened() -> None:
    bench = CoreBench(WHOLE)
    bench.tell(HEAD, opening(Stage(2, 5), wiring=wiring_of(MIDDLE)))
    assert bench.orders == [OpenSession(S, Stage(2, 5), 32, (), None)]


def test_streams_past_the_limit_are_refused_and_not_queued() -> None:
    bench = CoreBench(MIDDLE, max_concurrent_streams=2)
    bench.open(1)
    bench.open(2)
    bench.tell(HEAD, opening(MIDDLE, 3))
    [refusal] = bench.messages
    assert isinstance(refusal, Refused)
    assert refusal.code == "shard_unavailable"
    assert "all 2 streams are taken" in refusal.message
    bench.tell(HEAD, Close(session_id(1)))
    bench.tell(HEAD, opening(MIDDLE, 4))
    assert isinstance(bench.orders[0], OpenSession)


def test_the_worker_may_refuse_and_the_session_is_gone() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE))
    bench.hear(SessionRefused(S, "kv_budget_exceeded", "no room"))
    assert bench.messages == [Refused(S, 0, "kv_budget_exceeded", "no room")]
    assert bench.core.session_count == 0


def test_a_duplicate_open_changes_nothing() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0)
    bench.tell(HEAD, opening(MIDDLE))
    assert (bench.sent, bench.work) == ([], [])
    assert bench.core.counters["duplicate_open"] == 1
    bench.step(1)  # the session goes on where it was
    assert bench.batch.items[0].position == 1


def test_an_open_that_comes_after_its_close_does_not_bring_the_session_back() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.tell(HEAD, Close(S))
    bench.tell(HEAD, opening(MIDDLE))
    assert (bench.sent, bench.work, bench.core.session_count) == ([], [], 0)


def test_an_open_that_is_overtaken_by_its_close_is_not_taken() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, Close(S))
    bench.tell(HEAD, opening(MIDDLE))
    assert (bench.sent, bench.work, bench.core.session_count) == ([], [], 0)


def test_nobody_can_close_what_another_head_has_yet_to_open() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(STRANGER, Close(S))  # a neighbour, perhaps, who knows the session's name from its own opening
    bench.open()
    assert bench.core.has_session(S)


def test_a_flood_of_closes_is_not_remembered_for_ever() -> None:
    bench = CoreBench(MIDDLE)
    for number in range(1500):
        bench.tell(HEAD, Close(session_id(number)))
    assert len(bench.core._life.closed_early) <= 1024


def test_a_late_copy_of_a_refused_open_is_not_taken_when_there_is_room_again() -> None:
    bench = CoreBench(MIDDLE, max_concurrent_streams=1)
    bench.open(1)
    bench.tell(HEAD, opening(MIDDLE, 2))
    assert [type(m) for m in bench.messages] == [Refused]
    bench.tell(HEAD, Close(S))
    bench.tell(HEAD, opening(MIDDLE, 2))
    assert (bench.sent, bench.work, bench.core.session_count) == ([], [], 0)


def test_a_flood_of_refused_opens_is_not_remembered_for_ever() -> None:
    bench = CoreBench(MIDDLE)
    for number in range(1500):
        bench.tell(HEAD, opening(MIDDLE, number, weights_sha256="b" * 64))
    assert bench.core.counters["refused_weights_mismatch"] == 1500
    assert len(bench.core._life.closed) <= 1024


def test_another_head_cannot_take_over_an_open_session() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.tell(OTHER_HEAD, opening(MIDDLE))
    assert [(e.node, type(e.message)) for e in bench.sent] == [(OTHER_HEAD, Refused)]
    bench.tell(OTHER_HEAD, Close(S))
    assert bench.core.has_session(S)


def test_closed_before_the_worker_has_answered_nothing_is_said_and_nothing_left() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE))
    bench.tell(HEAD, Close(S))
    assert bench.orders == [CloseSession(S)]
    assert bench.hear(SessionOpened(S)) == []
    assert bench.core.session_count == 0


def opened_and_closed(bench: CoreBench, numbers: range) -> int:
    """How many openings the worker is given where a head takes each back at once."""
    given = 0
    for number in numbers:
        bench.tell(HEAD, opening(MIDDLE, number))
        given += sum(isinstance(order, OpenSession) for order in bench.orders)
        bench.tell(HEAD, Close(session_id(number)))
    return given


def test_opening_and_closing_at_once_piles_up_no_more_work_than_there_are_streams() -> None:
    bench = CoreBench(MIDDLE, max_concurrent_streams=4)
    bench.open(1, OTHER_HEAD)
    assert opened_and_closed(bench, range(2, 2000)) == 3
    assert bench.core.is_working
    bench.tell(HEAD, opening(MIDDLE, 2))  # by now forgotten among the closed, and still with the worker
    assert (bench.sent, bench.work) == ([], [])
    bench.hear(SessionOpened(session_id(2)))
    bench.hear(SessionRefused(session_id(3), "bad_grammar", "no"))
    assert opened_and_closed(bench, range(3000, 3010)) == 2  # as many as it has dealt with
    assert bench.core.session_count == 1


@pytest.mark.parametrize("end", ["worker", "eviction"])
def test_what_a_worker_that_is_gone_has_not_answered_takes_no_stream(end: str) -> None:
    bench = CoreBench(MIDDLE, max_concurrent_streams=2)
    assert opened_and_closed(bench, range(1, 5)) == 2
    if end == "worker":
        bench.lose_worker()
    else:
        bench.core.evict()
    bench.tell(HEAD, opening(MIDDLE, 6))
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    assert [type(order) for order in bench.orders] == [OpenSession]


def test_what_was_closed_while_the_shard_was_being_loaded_takes_no_stream() -> None:
    bench = CoreBench(MIDDLE, is_loaded=False, max_concurrent_streams=1)
    for number in range(1, 5):
        bench.tell(HEAD, opening(MIDDLE, number))
        bench.tell(HEAD, Close(session_id(number)))
    bench.tell(HEAD, opening(MIDDLE, 6))
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    assert [order.session for order in bench.orders if isinstance(order, OpenSession)] == [session_id(6)]


# ---------------------------------------------------------------- steps


def test_a_step_goes_to_the_worker_and_its_output_to_the_next_shard() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    [effect] = bench.run(0, 3)
    assert (effect.node, effect.address) == (AFTER, "after:1")
    assert isinstance(effect.message, Step)
    assert effect.message.session == session_id(1001)
    assert (effect.message.position, effect.message.count, effect.message.layer) == (0, 3, 6)
    assert (effect.message.codec, effect.message.chooses) == ("fp32", True)
    assert len(effect.body) == 3 * ROW_BYTES


def test_the_last_shard_answers_the_head_with_tokens_and_never_with_activations() -> None:
    bench = CoreBench(LAST)
    bench.open()
    [effect] = bench.run(0, 4)
    assert effect.node == HEAD
    assert isinstance(effect.message, Result)
    assert (effect.message.position, effect.message.token, effect.body) == (4, 7, b"")


def test_a_remote_prefix_returns_hidden_states_never_logits() -> None:
    bench = CoreBench(FIRST)
    bench.open(wiring=Wiring(None, None, None, None, 0, 1))
    [effect] = bench.run(0, 2)
    assert effect.node == HEAD
    assert isinstance(effect.message, Step)
    assert (effect.message.layer, effect.message.codec, len(effect.body)) == (3, "fp32", 2 * ROW_BYTES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": 2}, "step at position 2, expected 1"),
        ({"count": 32}, "past the 32 that were reserved"),
        ({"layer": 4}, "activations for layer 4, expected 3"),
        ({"codec": "int8"}, "codec int8, expected fp32"),
        ({"codec": None}, "codec None, expected fp32"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_its_sender_named(changes: dict[str, object], words: str) -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0)
    [effect] = bench.step(1, **changes)
    assert effect.node == HEAD
    assert isinstance(effect.message, Fault)
    assert (effect.message.code, effect.message.culprit) == ("bad_request", BEFORE)
    assert words in effect.message.message
    assert bench.work == []
    assert bench.core.counters["refused_step"] == 1


@pytest.mark.parametrize("size", [0, 1, ROW_BYTES - 1, ROW_BYTES + 1, 3 * ROW_BYTES])
def test_a_body_of_the_wrong_size_is_refused(size: int) -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    [effect] = bench.tell(BEFORE, Step(S, 0, 0, 1, 3, "fp32", True, source=BEHIND.session), bytes(size))
    assert isinstance(effect.message, Fault)
    assert f"{size} bytes for 1 positions, expected {ROW_BYTES}" in effect.message.message


def test_a_lossy_boundary_fixes_the_codec_on_both_sides_of_a_shard() -> None:
    bench = CoreBench(MIDDLE)
    bench.open(boundaries=(boundary(3, "int8"), boundary(6, "fp16")))
    assert isinstance(bench.step(0, codec="fp32")[0].message, Fault)
    bench.step(0, codec="int8")
    assert bench.batch.items[0].codec == "int8"
    assert bench.batch.items[0].output_codec == "fp16"
    [effect] = bench.done(bench.batch)
    assert isinstance(effect.message, Step)
    assert effect.message.codec == "fp16"


def test_a_step_before_the_session_is_open_is_refused() -> None:
    bench = CoreBench(MIDDLE)
    bench.tell(HEAD, opening(MIDDLE))
    [effect] = bench.step(0)
    assert isinstance(effect.message, Fault)
    assert "not open yet" in effect.message.message


def test_a_session_may_not_pile_up_steps() -> None:
    bench = CoreBench(MIDDLE, max_waiting=3)
    bench.open()
    for position in range(4):  # one runs, three wait
        assert bench.step(position) == []
    [effect] = bench.step(4)
    assert isinstance(effect.message, Fault)
    assert "more than 3 steps are waiting" in effect.message.message


def test_a_step_of_another_epoch_is_dropped_and_counted() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.tell(HEAD, rewire(2, 0, wiring_of(MIDDLE)))
    assert bench.step(0, epoch=1) == []
    assert bench.step(0, epoch=3) == []
    assert (bench.core.counters["stale_epoch"], bench.core.counters["future_epoch"]) == (1, 1)
    assert bench.work == []


def test_a_doubled_step_is_dropped_and_counted() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0)
    batch = bench.batch
    assert bench.step(0) == []
    assert bench.work == []
    bench.done(batch)
    assert bench.step(0) == []
    assert bench.core.counters["duplicate_step"] == 2


def test_a_late_step_after_the_close_is_dropped() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0)
    batch = bench.batch
    bench.tell(HEAD, Close(S))
    assert bench.orders == [CloseSession(S)]
    assert bench.step(1) == []
    assert bench.done(batch) == []  # computed for nobody
    assert bench.core.counters["unknown_session"] == 1
    assert bench.core.outbox_bytes == 0


def test_the_worker_finds_rubbish_and_the_sender_is_named() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0)
    [effect] = bench.done(bench.batch, code="shard_corruption", text="NaN in row 0")
    assert effect.message == Fault(S, 0, "shard_corruption", "NaN in row 0", BEFORE)
    assert bench.core.counters["shard_corruption"] == 1


def test_rubbish_is_reported_once_and_what_follows_it_is_not_computed() -> None:
    """Without the step before them the next ones would fail as well, and look like this shard's own fault."""
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0)
    rubbish = bench.batch
    bench.step(1)  # waits
    assert len(bench.done(rubbish, code="shard_corruption", text="NaN in row 0")) == 1
    assert bench.orders == []
    assert bench.step(2) == []
    assert bench.orders == []
    assert bench.core.counters["after_a_fault"] == 1
    assert bench.core.state.queue_depth == 0
    bench.tell(HEAD, Rewire(S, 1, 0, wiring_of(MIDDLE)))
    bench.step(0, epoch=1)
    assert isinstance(bench.done(bench.batch)[0].message, Step)


def test_what_the_worker_has_in_hand_when_a_step_fails_is_no_fault_of_its_own() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.step(4, 4)
    rubbish = bench.batch
    bench.step(8, 4)
    after = bench.batch
    [effect] = bench.done(rubbish, code="shard_corruption", text="NaN in row 0")
    assert effect.message == Fault(S, 0, "shard_corruption", "NaN in row 0", BEFORE)
    assert bench.done(after, code="bad_request", text="position 8, expected 4") == []
    assert bench.core.counters == {"shard_corruption": 1}


def test_a_step_that_was_refused_says_nothing_of_how_long_the_next_takes() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0, 4)
    output = WorkOutput(S, 4 * ROW_BYTES, None, None, (), "", "")
    bench.hear(BatchDone(bench.batch.batch, (output,), 40_000_000), bytes(4 * ROW_BYTES))
    bench.step(4, 4)
    refused = msgspec.structs.replace(output, size_bytes=0, code="kv_budget_exceeded")
    bench.hear(BatchDone(bench.batch.batch, (refused,), 0))
    bench.tell(HEAD, Rewire(S, 1, 4, wiring_of(MIDDLE)))
    bench.step(4, 4, epoch=1)
    assert len(bench.batches) == 1
    bench.step(8, 4, epoch=1)
    assert bench.batches == []


def test_what_the_worker_has_in_hand_when_a_session_is_cut_is_void() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.step(4, 4)
    first = bench.batch
    bench.step(8, 4)
    second = bench.batch
    bench.tell(HEAD, Truncate(S, 0, 4))
    bench.step(4, 2)
    assert bench.batches == [], "two are enough"
    assert bench.done(first) == []
    assert [item.position for batch in bench.batches for item in batch.items] == [4]
    third = bench.batch
    assert bench.done(second) == []
    [effect] = bench.done(third)
    assert isinstance(effect.message, Step)
    assert (effect.message.position, effect.message.count) == (4, 2)


def test_an_error_of_the_worker_is_this_shards_own() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0)
    [effect] = bench.done(bench.batch, code="internal_error", text="?")
    assert isinstance(effect.message, Fault)
    assert effect.message.culprit == SHARD


def test_times_that_a_neighbour_reports_cannot_make_our_own_messages_invalid() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    [effect] = bench.run(0, spent=bytes([255]) * (MAX_STAGES * SPENT_BYTES))
    assert isinstance(effect.message, Step)
    assert len(effect.message.spent) == MAX_STAGES * SPENT_BYTES
    encoded = msgspec.msgpack.encode(effect.message)
    assert msgspec.msgpack.decode(encoded, type=Step) == effect.message


# ---------------------------------------------------------------- batches


def decode_sessions(bench: CoreBench, count: int, stages: int) -> None:
    for number in range(1, count + 1):
        bench.open(number, wiring=wiring_of(bench.stage, stages=stages))


def numbers_of(batch: RunBatch) -> list[int]:
    return [int.from_bytes(item.session, "big") for item in batch.items]


@pytest.mark.parametrize(
    ("sessions", "stages", "most"), [(1, 4, 1), (4, 2, 2), (5, 2, 3), (8, 2, 4), (8, 3, 3), (8, 8, 1)]
)
def test_a_batch_takes_as_many_decode_steps_as_sessions_by_shards(sessions: int, stages: int, most: int) -> None:
    bench = CoreBench(MIDDLE)
    decode_sessions(bench, sessions, stages)
    sizes = []
    with_worker: deque[RunBatch] = deque()
    for number in range(1, sessions + 1):
        bench.step(0, session=number)
        with_worker += bench.batches
    while with_worker:
        sizes.append(len(with_worker[0].items))
        bench.done(with_worker.popleft())
        with_worker += bench.batches
        assert len(with_worker) <= 2
    assert sizes[0] == 1  # it never waits for a wave to fill up
    assert max(sizes) == min(most, max(1, sessions - 1))
    assert sum(sizes) == sessions


def test_a_full_batch_goes_to_the_worker_before_it_has_answered_the_last() -> None:
    bench = CoreBench(MIDDLE)
    decode_sessions(bench, 8, stages=2)
    bench.step(0, session=1)
    first = bench.batch
    for number in (2, 3, 4):
        bench.step(0, session=number)
        assert bench.work == []  # others may still come, and be computed with these
    bench.step(0, session=5)
    second = bench.batch
    assert numbers_of(second) == [2, 3, 4, 5]
    for number in (6, 7, 8):
        bench.step(0, session=number)
    assert len(bench.done(first)) == 1
    assert bench.work == []  # three are not full
    bench.step(1, session=1)
    third = bench.batch
    assert numbers_of(third) == [6, 7, 8, 1]
    assert len(bench.done(second)) == len(bench.done(third)) == 4
    assert bench.core.state.queue_depth == 0


def test_no_more_than_two_batches_are_with_the_worker() -> None:
    bench = CoreBench(MIDDLE)
    decode_sessions(bench, 8, stages=8)
    bench.step(0, session=1)
    first = bench.batch
    bench.step(0, session=2)
    assert numbers_of(bench.batch) == [2]
    for number in range(3, 9):
        bench.step(0, session=number)
        assert bench.work == []
    bench.done(first)
    assert numbers_of(bench.batch) == [3]


def test_a_prompt_does_not_go_to_a_worker_that_computes() -> None:
    """It may take long, and whoever comes meanwhile would wait for it and for what runs."""
    bench = CoreBench(MIDDLE)
    decode_sessions(bench, 4, stages=2)
    bench.step(0, session=1)
    running = bench.batch
    bench.step(0, 5, session=2)
    bench.step(0, session=3)
    bench.step(0, session=4)
    assert bench.work == []
    bench.done(running)
    assert numbers_of(bench.batch) == [2, 3, 4]


def test_a_session_that_ends_or_is_cut_wants_nothing_of_a_batch_that_waits_in_the_worker() -> None:
    bench = CoreBench(MIDDLE)
    decode_sessions(bench, 6, stages=2)
    bench.step(0, session=1)
    first = bench.batch
    for number in (2, 3, 4):
        bench.step(0, session=number)
    second = bench.batch
    bench.tell(HEAD, Close(session_id(2)))
    bench.tell(HEAD, Rewire(session_id(3), 1, 0, wiring_of(MIDDLE, stages=2)))
    bench.done(first)
    assert len(bench.done(second)) == 1  # the fourth's
    bench.step(0, session=3, epoch=1)
    assert numbers_of(bench.batch) == [3]


def test_prompts_share_a_batch_up_to_its_budget_of_tokens() -> None:
    bench = CoreBench(MIDDLE, batch_tokens=8)
    for number in range(1, 6):
        bench.open(number)
    bench.step(0, 2, session=1)
    running = bench.batch
    for number, count in ((2, 4), (3, 5), (4, 3), (5, 1)):
        bench.step(0, count, session=number)
    bench.done(running)
    # 4 + 3 fit into 8; the chunk of 5 waits its turn; the decode step comes along.
    assert [(int.from_bytes(i.session, "big"), i.count) for i in bench.batch.items] == [(2, 4), (4, 3), (5, 1)]
    bench.done(bench.batch)
    assert [(int.from_bytes(i.session, "big"), i.count) for i in bench.batch.items] == [(3, 5)]


def test_a_chunk_larger_than_the_budget_runs_alone_among_prompts() -> None:
    bench = CoreBench(MIDDLE, batch_tokens=8)
    bench.open(1)
    bench.step(0, 20)
    assert bench.batch.items[0].count == 20


def test_outputs_of_a_batch_go_where_each_belongs() -> None:
    bench = CoreBench(MIDDLE)
    hops = {number: Hop(AFTER, "", session_id(2000 + number)) for number in (1, 2, 3)}
    for number, hop in hops.items():
        bench.open(number, wiring=msgspec.structs.replace(wiring_of(MIDDLE, stages=1), next=hop))
    bench.step(0, session=1)
    running = bench.batch
    bench.step(0, session=2)
    bench.step(0, session=3)
    bench.done(running)
    batch = bench.batch
    outputs = [(item.session, bytes([item.session[-1]]) * ROW_BYTES) for item in batch.items]
    done = BatchDone(batch.batch, tuple(WorkOutput(s, ROW_BYTES, None, None, (), "", "") for s, _ in outputs), 1)
    bench.hear(done, b"".join(body for _, body in outputs))
    assert {(e.message.session, e.body) for e in bench.sent} == {  # type: ignore[union-attr]
        (session_id(2002), b"\x02" * ROW_BYTES),
        (session_id(2003), b"\x03" * ROW_BYTES),
    }


def test_steps_of_one_session_keep_their_order() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0, 4)
    batch = bench.batch
    bench.step(4, 4)
    bench.step(8, 1)
    positions = []
    for _ in range(3):
        positions.append(batch.items[0].position)
        bench.done(batch)
        batch = bench.batch if bench.work else batch
    assert positions == [0, 4, 8]


def test_an_answer_to_a_batch_that_nobody_sent_is_counted() -> None:
    bench = CoreBench(MIDDLE)
    assert bench.hear(BatchDone(77, (), 1)) == []
    assert bench.core.counters["unknown_batch"] == 1


# ---------------------------------------------------------------- the ring


def test_the_ring_goes_on_while_there_is_credit_and_holds_the_token_when_there_is_none() -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True))
    bench.tell(HEAD, Credit(S, 0, 1))
    fed, result = bench.run(0, 4)
    assert isinstance(result.message, Result)
    assert (fed.node, fed.message, fed.body) == (
        BEFORE, Step(session_id(1000), 0, 4, 1, 0, None, True, source=S), (7).to_bytes(4, "little"),
    )  # fmt: skip
    [result] = bench.run(4)  # the credit is spent: the head gets the token, the ring does not
    assert isinstance(result.message, Result)
    [fed] = bench.tell(HEAD, Credit(S, 0, 3))
    assert isinstance(fed.message, Step)
    assert fed.message.position == 5


def test_a_token_that_waits_for_credit_is_forgotten_when_it_is_cut_off() -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True))
    bench.run(0, 4)  # without credit
    bench.tell(HEAD, Truncate(S, 0, 3))
    assert bench.tell(HEAD, Credit(S, 0, 1)) == []


def test_a_round_does_not_count_how_long_the_reader_was_waited_for() -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True))
    bench.tell(HEAD, Credit(S, 0, 1))
    bench.run(0, 4)
    bench.run(4)  # the credit is spent
    bench.now_s += 60.0
    bench.tell(HEAD, Credit(S, 0, 1))
    bench.now_s += 0.25
    [result] = bench.run(5)
    assert result.message.round_us == 250_000  # type: ignore[union-attr]
    bench.tell(HEAD, Credit(S, 0, 2))
    bench.now_s += 0.5
    bench.tell(HEAD, Credit(S, 0, 2))  # nothing waited for it
    assert bench.run(6)[-1].message.round_us == 500_000  # type: ignore[union-attr]


def test_the_last_shard_tells_how_long_a_round_took_by_its_own_clock() -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True))
    rounds = []
    for now_s, (position, count) in ((10.0, (0, 4)), (10.5, (4, 1)), (10.75, (5, 1))):
        bench.now_s = now_s
        rounds.append(bench.run(position, count)[-1].message.round_us)  # type: ignore[union-attr]
    assert rounds == [0, 500_000, 250_000]
    bench.tell(HEAD, Rewire(S, 1, 6, wiring_of(LAST, ring=True)))
    bench.now_s = 99.0  # a pause, not a round
    [result] = bench.run(6, epoch=1)
    assert result.message.round_us == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(("token", "limit"), [(99, 20), (7, 5)])
def test_the_ring_stops_at_the_end(token: int, limit: int) -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True), sampler=sampler_of(limit=limit))
    bench.tell(HEAD, Credit(S, 0, 16))
    bench.step(0, 4)
    assert [type(e.message) for e in bench.done(bench.batch, token=token)] == [Result]


def test_credit_of_another_epoch_is_not_taken() -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True))
    bench.tell(HEAD, Credit(S, 1, 5))
    assert [type(e.message) for e in bench.run(0, 4)] == [Result]
    assert bench.core.counters["stale_epoch"] == 1


def test_one_shard_runs_the_whole_loop() -> None:
    bench = CoreBench(WHOLE)
    bench.open(wiring=wiring_of(WHOLE, ring=True, stages=1))
    bench.tell(HEAD, Credit(S, 0, 2))
    bench.step(0, 4)
    positions = []
    for _ in range(3):
        batch = bench.batch
        positions.append(batch.items[0].position)
        [result] = bench.done(batch)
        assert isinstance(result.message, Result)
    assert positions == [0, 4, 5]
    assert bench.work == []  # two credits, two tokens past the prompt


def test_sessions_that_one_shard_runs_alone_stay_together() -> None:
    bench = CoreBench(WHOLE)
    for number in (1, 2, 3):
        bench.open(number, wiring=wiring_of(WHOLE, ring=True, stages=1, session=number))
        bench.tell(HEAD, Credit(session_id(number), 0, 9))
        bench.step(0, session=number)
        if number == 1:
            batch = bench.batch  # it starts before the others have come
    sizes = []
    for _ in range(4):
        sizes.append(len(batch.items))
        bench.done(batch)
        batch = bench.batch
    assert sizes == [1, 3, 3, 3]


def test_a_head_cannot_feed_another_heads_session_through_the_ring() -> None:
    bench = CoreBench(WHOLE)
    bench.open(1, wiring=wiring_of(WHOLE, ring=True, stages=1))
    theirs = Wiring(None, None, Hop(SHARD, "", S), SHARD, 0, 1)
    bench.open(2, head=OTHER_HEAD, wiring=theirs, epoch=0, sampler=sampler_of(prompt=1))
    bench.tell(OTHER_HEAD, Credit(session_id(2), 0, 5))
    before = repr(bench.core._sessions[S])
    bench.step(0, session=2, sender=OTHER_HEAD)
    bench.done(bench.batch)
    assert repr(bench.core._sessions[S]) == before
    assert bench.work == []


def test_the_ring_cannot_run_past_what_was_reserved() -> None:
    bench = CoreBench(WHOLE)
    bench.open(wiring=wiring_of(WHOLE, ring=True, stages=1), positions=5, sampler=sampler_of(limit=1000))
    bench.tell(HEAD, Credit(S, 0, 1000))
    bench.step(0, 4)
    bench.done(bench.batch)
    assert bench.batch.items[0].position == 4
    bench.done(bench.batch)
    assert bench.work == []


# ---------------------------------------------------------------- a new epoch


def test_rewire_cuts_back_and_answers_with_what_is_kept() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.run(4, 4)
    bench.tell(HEAD, rewire(1, 6, wiring_of(MIDDLE, forward_from=6)))
    assert bench.orders == [TruncateSession(S, 6, None)]
    assert bench.messages == [Rewired(S, 1, 6, 0)]
    assert bench.core.outbox_bytes == 6 * ROW_BYTES


def test_the_worker_learns_the_sampler_of_the_last_rewire_with_the_next_step() -> None:
    """Making one may take long (a grammar), and a rewire has no answer: a head that sends many must not keep the worker busy."""
    bench = CoreBench(LAST)
    bench.open()
    bench.run(0, 4)
    for epoch in range(1, 50):
        bench.tell(HEAD, rewire(epoch, 3, wiring_of(LAST), sampler_of(limit=100 + epoch)))
        assert bench.orders == [TruncateSession(S, 3, None)]
    bench.step(3, epoch=49)
    assert bench.orders == [TruncateSession(S, 3, sampler_of(limit=149)), bench.batch]
    bench.done(bench.batch)
    bench.step(4, epoch=49)
    assert bench.orders == [bench.batch]


def test_rewire_says_how_little_it_has() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.tell(HEAD, rewire(1, 9, wiring_of(MIDDLE)))
    assert bench.messages == [Rewired(S, 1, 4, 0)]


def test_a_rewire_of_the_same_or_an_older_epoch_is_dropped() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.tell(HEAD, rewire(3, 0, wiring_of(MIDDLE)))
    for epoch in (3, 2, 0):
        assert bench.tell(HEAD, rewire(epoch, 0, wiring_of(MIDDLE))) == []
    assert bench.core.counters["stale_epoch"] == 3


def test_what_was_computed_for_the_old_epoch_goes_nowhere() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0, 4)
    batch = bench.batch
    bench.tell(HEAD, rewire(1, 0, wiring_of(MIDDLE)))
    assert bench.messages == [Rewired(S, 1, 0, 0)]
    assert bench.done(batch) == []
    assert bench.core.outbox_bytes == 0
    bench.step(0, 4, epoch=1)
    assert bench.batch.items[0].position == 0


def test_steps_that_waited_in_the_old_epoch_are_forgotten() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0, 4)
    batch = bench.batch
    bench.step(4, 4)
    bench.tell(HEAD, rewire(1, 0, wiring_of(MIDDLE)))
    bench.done(batch)
    assert bench.work == []


def test_a_truncation_within_an_epoch_cuts_off_what_is_being_computed() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.step(4, 4)
    batch = bench.batch
    bench.tell(HEAD, Truncate(S, 0, 3))
    assert bench.orders == [TruncateSession(S, 3, None)]
    assert bench.done(batch) == []  # the worker truncates after it: its output is of positions that are no more
    [probed] = bench.tell(HEAD, Probe(S, 1))
    assert isinstance(probed.message, Probed)
    assert (probed.message.position_in, probed.message.position_out) == (3, 3)
    assert bench.core.outbox_bytes == 3 * ROW_BYTES
    bench.step(3)
    assert bench.batch.items[0].position == 3


def test_outputs_below_forward_from_are_kept_and_not_sent() -> None:
    bench = CoreBench(MIDDLE)
    bench.open(wiring=wiring_of(MIDDLE, forward_from=4))
    assert bench.run(0, 4) == []
    assert bench.core.outbox_bytes == 4 * ROW_BYTES
    assert len(bench.run(4)) == 1


def test_the_last_shard_is_silent_about_what_the_head_has_already() -> None:
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, forward_from=4))
    assert bench.run(0, 4, chooses=False) == []
    [effect] = bench.run(4)
    assert isinstance(effect.message, Result)
    assert effect.message.position == 5


def test_replay_sends_the_same_bytes_to_the_new_neighbour() -> None:
    bench = CoreBench(MIDDLE, replay_rows=4)
    bench.open()
    first = bench.run(0, 3) + bench.run(3, 1) + bench.run(4, 2)
    new = Hop(STRANGER, "new:1", session_id(55))
    bench.tell(HEAD, rewire(1, 6, msgspec.structs.replace(wiring_of(MIDDLE), next=new)))
    replayed = bench.tell(HEAD, Replay(S, 1, 0, 6))
    assert {effect.node for effect in replayed} == {STRANGER}
    assert b"".join(e.body for e in replayed) == b"".join(e.body for e in first)
    steps = [e.message for e in replayed]
    assert [(s.position, s.count, s.chooses, s.epoch) for s in steps] == [(0, 4, False, 1), (4, 2, False, 1)]  # type: ignore[union-attr]


def test_replay_sends_what_was_asked_for_and_no_more() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 8)
    replayed = bench.tell(HEAD, Replay(S, 0, 2, 5))
    assert [(e.message.position, e.message.count, len(e.body)) for e in replayed] == [(2, 3, 3 * ROW_BYTES)]  # type: ignore[union-attr]


def test_a_replay_of_a_long_session_fits_into_the_next_shards_queue() -> None:
    bench = CoreBench(MIDDLE, replay_rows=8)
    after = CoreBench(Stage(6, 7))
    count = 8 * 64 * 3
    bench.open(positions=count)
    for position in range(0, count, 16):
        bench.run(position, 16, chooses=False)
    replayed = bench.tell(HEAD, Replay(S, 0, 0, count))
    after.open(positions=count, wiring=msgspec.structs.replace(wiring_of(Stage(6, 7)), previous=Neighbour(SHARD, S)))
    for effect in replayed:
        after.tell(SHARD, msgspec.structs.replace(effect.message, session=S), effect.body)
        assert not [m for m in after.messages if isinstance(m, Fault)]


def places(sent: list[SendTo]) -> list[tuple[bytes, int, int, bool]]:
    steps = [(effect.node, effect.message) for effect in sent if isinstance(effect.message, Step)]
    return [(node, step.position, step.count, step.chooses) for node, step in steps]


def with_a_new_neighbour(length: int = 6, **changes: object) -> CoreBench:
    """It has computed `length` positions, and is followed by somebody new who has none."""
    bench = CoreBench(MIDDLE, **changes)
    bench.open()
    bench.run(0, length)
    new = Hop(STRANGER, "new:1", session_id(55))
    bench.tell(HEAD, rewire(1, length, msgspec.structs.replace(wiring_of(MIDDLE), next=new)))
    return bench


def test_a_step_that_overtakes_the_order_to_replay_takes_along_what_the_new_neighbour_lacks() -> None:
    """That order comes from the head, the step by way of the shard before: either may be first."""
    bench = with_a_new_neighbour()
    sent = bench.run(6, epoch=1)
    assert places(sent) == [(STRANGER, 0, 6, False), (STRANGER, 6, 1, True)]
    assert len(sent[0].body) == 6 * ROW_BYTES
    assert bench.tell(HEAD, Replay(S, 1, 0, 6)) == []
    assert bench.core.counters["late_replay"] == 1
    assert places(bench.run(7, epoch=1)) == [(STRANGER, 7, 1, True)]


def test_after_a_replay_that_came_in_time_a_step_goes_alone() -> None:
    bench = with_a_new_neighbour()
    assert places(bench.tell(HEAD, Replay(S, 1, 0, 6))) == [(STRANGER, 0, 6, False)]
    assert places(bench.run(6, epoch=1)) == [(STRANGER, 6, 1, True)]
    assert bench.tell(HEAD, Replay(S, 1, 0, 6)) == []  # a copy of the order


def test_each_epoch_owes_anew() -> None:
    bench = with_a_new_neighbour()
    bench.tell(HEAD, Replay(S, 1, 0, 6))
    bench.tell(HEAD, rewire(2, 5, wiring_of(MIDDLE)))
    assert places(bench.run(5, epoch=2)) == [(AFTER, 0, 5, False), (AFTER, 5, 1, True)]
    bench.tell(HEAD, rewire(3, 6, wiring_of(MIDDLE)))
    assert places(bench.tell(HEAD, Replay(S, 3, 0, 6))) == [(AFTER, 0, 6, False)]
    bench.tell(HEAD, rewire(4, 6, wiring_of(MIDDLE, forward_from=6)))
    assert places(bench.run(6, epoch=4)) == [(AFTER, 6, 1, True)]


def test_nothing_is_sent_on_past_what_is_gone() -> None:
    """Whoever follows would call this shard a liar for the gap."""
    bench = with_a_new_neighbour(outbox_budget_bytes=4 * ROW_BYTES)
    for position in (6, 7):
        [effect] = bench.run(position, epoch=1)
        assert isinstance(effect.message, Fault)
        assert (effect.message.code, effect.message.culprit) == ("outbox_dropped", SHARD)


def test_what_was_cut_off_within_an_epoch_is_sent_on_when_it_comes_again() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.tell(HEAD, Truncate(S, 0, 2))
    assert places(bench.run(2, 2)) == [(AFTER, 2, 2, True)]


def test_a_replay_that_is_not_possible_is_a_fault() -> None:
    bench = CoreBench(MIDDLE)
    bench.open(keeps_outbox=False)
    bench.run(0, 4)
    [effect] = bench.tell(HEAD, Replay(S, 0, 0, 4))
    assert isinstance(effect.message, Fault)
    assert (effect.message.code, effect.message.culprit) == ("outbox_dropped", SHARD)


def test_the_outbox_of_the_session_that_wrote_least_recently_is_dropped() -> None:
    bench = CoreBench(MIDDLE, outbox_budget_bytes=6 * ROW_BYTES)
    bench.open(1)
    bench.open(2)
    bench.run(0, 4, session=1)
    bench.run(0, 4, session=2)
    assert bench.core.outbox_bytes == 4 * ROW_BYTES
    bench.tell(HEAD, rewire(1, 4, wiring_of(MIDDLE)))
    assert bench.messages == [Rewired(S, 1, 4, 4)]
    bench.tell(HEAD, Rewire(session_id(2), 1, 4, wiring_of(MIDDLE)))
    assert bench.messages == [Rewired(session_id(2), 1, 4, 0)]


def test_a_session_that_starts_anew_has_an_outbox_again() -> None:
    bench = CoreBench(MIDDLE, outbox_budget_bytes=6 * ROW_BYTES)
    bench.open()
    bench.run(0, 8)
    assert bench.core.outbox_bytes == 0
    bench.tell(HEAD, rewire(1, 0, wiring_of(MIDDLE)))
    assert bench.messages == [Rewired(S, 1, 0, 0)]
    bench.run(0, 4, epoch=1)
    assert [type(e.message) for e in bench.tell(HEAD, Replay(S, 1, 0, 4))] == [Step]


def test_a_rewire_before_the_session_is_open_disturbs_nothing() -> None:
    bench = CoreBench(MIDDLE, is_loaded=False)
    bench.tell(HEAD, opening(MIDDLE))
    assert bench.orders == [Load(MIDDLE)]
    for message in (rewire(1, 0, wiring_of(MIDDLE)), Truncate(S, 0, 0), Credit(S, 0, 1), Replay(S, 0, 0, 1)):
        assert bench.tell(HEAD, message) == []
        assert bench.work == []  # the worker does not know the session yet
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    assert [type(order) for order in bench.orders] == [OpenSession]


# ---------------------------------------------------------------- losses


def test_a_lost_worker_is_reported_to_every_head_and_nothing_is_left() -> None:
    bench = CoreBench(MIDDLE)
    bench.open(1)
    bench.open(2, head=OTHER_HEAD)
    bench.tell(HEAD, opening(MIDDLE, 3))  # still opening
    bench.run(0, 4)
    bench.step(4)
    bench.lose_worker()
    faults = [(e.node, e.message.code, e.message.culprit) for e in bench.sent if isinstance(e.message, Fault)]
    assert faults == [
        (HEAD, "shard_unavailable", SHARD),
        (OTHER_HEAD, "shard_unavailable", SHARD),
        (HEAD, "shard_unavailable", SHARD),
    ]
    assert (bench.core.session_count, bench.core.outbox_bytes, bench.core.state.queue_depth) == (0, 0, 0)


def test_after_a_new_worker_has_loaded_sessions_open_and_run() -> None:
    bench = CoreBench(MIDDLE)
    bench.open(1)
    bench.step(0)
    bench.lose_worker()
    bench.tell(HEAD, opening(MIDDLE, 2))
    assert bench.work == []  # the supervisor loads again by itself
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    assert bench.orders == [OpenSession(session_id(2), MIDDLE, 32, (), None)]
    bench.hear(SessionOpened(session_id(2)))
    bench.step(0, session=2)
    assert len(bench.batch.items) == 1


def test_sessions_end_with_the_link_to_their_head() -> None:
    bench = CoreBench(MIDDLE)
    bench.open(1)
    bench.open(2, head=OTHER_HEAD)
    bench.run(0, 4)
    bench.lose_node(HEAD)
    assert bench.orders == [CloseSession(S)]
    assert (bench.core.has_session(S), bench.core.session_count, bench.core.outbox_bytes) == (False, 1, 0)


def test_a_lost_neighbour_is_reported_by_name() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    assert [e.message for e in bench.lose_node(AFTER)] == [
        Fault(S, 0, "shard_unavailable", "the next shard is gone", AFTER)
    ]
    bench = CoreBench(LAST)
    bench.open(wiring=wiring_of(LAST, ring=True))
    [effect] = bench.lose_node(BEFORE)
    assert isinstance(effect.message, Fault)
    assert effect.message.culprit == BEFORE


def test_somebody_elses_loss_is_no_news() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    assert bench.lose_node(STRANGER) == []
    assert bench.core.has_session(S)


# ---------------------------------------------------------------- loading and eviction


def test_the_first_open_loads_and_the_session_opens_afterwards() -> None:
    bench = CoreBench(MIDDLE, is_loaded=False)
    bench.tell(HEAD, opening(MIDDLE))
    assert bench.orders == [Load(MIDDLE)]
    bench.tell(HEAD, opening(MIDDLE, 2))
    assert bench.work == []  # one load for both
    assert bench.core.is_working
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    assert [type(order) for order in bench.orders] == [OpenSession, OpenSession]


def test_a_load_that_fails_refuses_those_who_waited_and_can_be_tried_again() -> None:
    bench = CoreBench(MIDDLE, is_loaded=False)
    bench.tell(HEAD, opening(MIDDLE))
    bench.hear(LoadFailed(MIDDLE, "bad_model_file", "cut short"))
    assert bench.messages == [Refused(S, 0, "bad_model_file", "cut short")]
    assert bench.orders == [Unload(MIDDLE)]  # a worker without weights would only take memory
    assert bench.core.session_count == 0
    bench.tell(HEAD, opening(MIDDLE, 2))
    assert bench.orders == [Load(MIDDLE)]


def test_closed_while_it_was_being_loaded() -> None:
    bench = CoreBench(MIDDLE, is_loaded=False)
    bench.tell(HEAD, opening(MIDDLE))
    bench.tell(HEAD, Close(S))
    assert bench.work == []
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    assert bench.work == []


def test_an_idle_shard_is_evicted_and_loads_again_at_the_next_open() -> None:
    bench = CoreBench(MIDDLE, eviction_idle_s=600)
    bench.open()
    bench.now_s = 1000.0
    assert not bench.core.evict_if_idle(5000.0)  # live sessions are never evicted
    bench.tell(HEAD, Close(S))
    assert not bench.core.evict_if_idle(1599.0)
    assert bench.core.evict_if_idle(1600.0)
    bench.take()
    assert bench.orders == [Unload(MIDDLE)]
    assert not bench.core.state.is_loaded
    bench.tell(HEAD, opening(MIDDLE, 2))
    assert bench.orders == [Load(MIDDLE)]


def test_evicted_while_something_was_computed_for_nobody_it_still_runs_after_loading_again() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.step(0)
    bench.tell(HEAD, Close(S))
    bench.core.evict()
    bench.take()
    assert bench.orders == [Unload(MIDDLE)]
    bench.tell(HEAD, opening(MIDDLE, 2))
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    bench.hear(SessionOpened(session_id(2)))
    bench.step(0, session=2)
    assert len(bench.batch.items) == 1


# ---------------------------------------------------------------- sessions of which nothing is heard


def silent_at(bench: CoreBench, now_s: float) -> list[SendTo]:
    bench.core.give_up_silent(now_s)
    bench.take()
    return bench.sent


def test_a_session_of_which_nothing_is_heard_gives_its_stream_back_and_its_head_is_told() -> None:
    bench = CoreBench(MIDDLE, silent_session_s=300.0, max_concurrent_streams=1)
    bench.now_s = 10.0
    bench.open()
    assert silent_at(bench, 309.0) == []
    [told] = silent_at(bench, 310.0)
    assert told.node == HEAD
    assert isinstance(told.message, Fault)
    assert (told.message.session, told.message.code, told.message.culprit) == (S, "shard_unavailable", SHARD)
    assert bench.orders == [CloseSession(S)]
    assert (bench.core.session_count, bench.core.outbox_bytes) == (0, 0)
    bench.tell(OTHER_HEAD, opening(MIDDLE, 2))
    assert [type(order) for order in bench.orders] == [OpenSession]


@pytest.mark.parametrize(
    "message", [Probe(S, 0), Credit(S, 0, 1), Truncate(S, 0, 0), rewire(1, 0, wiring_of(LAST)), Replay(S, 0, 0, 0)]
)
def test_whatever_its_head_says_keeps_a_session(message: Message) -> None:
    bench = CoreBench(LAST, silent_session_s=300.0)
    bench.open()
    bench.now_s = 200.0
    bench.tell(HEAD, message)
    assert silent_at(bench, 499.0) == []
    assert len(silent_at(bench, 500.0)) == 1


def test_steps_keep_a_session_and_what_others_say_does_not() -> None:
    bench = CoreBench(MIDDLE, silent_session_s=300.0)
    bench.open()
    bench.now_s = 200.0
    bench.run(0)
    assert silent_at(bench, 499.0) == []
    bench.now_s = 400.0
    bench.tell(STRANGER, Probe(S, 1))
    bench.tell(STRANGER, Credit(S, 0, 1))
    bench.step(1, epoch=7)
    assert len(silent_at(bench, 500.0)) == 1


def test_a_session_that_waits_for_the_worker_is_not_silent_however_long_that_takes() -> None:
    bench = CoreBench(MIDDLE, is_loaded=False, silent_session_s=300.0)
    bench.tell(HEAD, opening(MIDDLE))
    assert silent_at(bench, 1000.0) == []  # weights are being read
    bench.now_s = 1000.0
    bench.hear(Loaded(MIDDLE, 0, 0, 1))
    bench.hear(SessionOpened(S))
    assert silent_at(bench, 1001.0) == []
    bench.step(0, 4)
    batch = bench.batch
    bench.step(4, 4)
    assert silent_at(bench, 2000.0) == []
    bench.now_s = 2000.0
    bench.done(batch)
    assert silent_at(bench, 2001.0) == []


# ---------------------------------------------------------------- probes


def test_a_probe_tells_the_head_how_far_the_session_and_how_silent_the_worker_is() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 4)
    bench.step(4, 2)
    bench.worker_idle_us = 12345
    [effect] = bench.tell(HEAD, Probe(S, 9))
    assert effect.message == Probed(S, 9, True, 12345, 6, 4, batches=2)


def test_a_probe_for_an_unknown_session_is_answered_so() -> None:
    bench = CoreBench(MIDDLE)
    [effect] = bench.tell(HEAD, Probe(S, 9))
    assert effect.message == Probed(S, 9, False, 0, 0, 0)


# ---------------------------------------------------------------- who is not part of a session


@pytest.mark.parametrize("outsider", [STRANGER, OTHER_HEAD, AFTER])
@pytest.mark.parametrize("message", every_message(S), ids=lambda value: type(value[0]).__name__)
def test_who_is_not_part_of_a_session_cannot_read_feed_truncate_or_close_it(
    outsider: bytes, message: tuple[Message, bytes]
) -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 5)
    before = repr(bench.core._sessions[S]), bench.core.outbox_bytes
    counted = sum(bench.core.counters.values())
    bench.tell(outsider, *message)
    assert (repr(bench.core._sessions[S]), bench.core.outbox_bytes) == before
    assert bench.work == []
    for effect in bench.sent:  # a refusal or an empty answer, to the asker alone; nothing of the session
        assert effect.node == outsider
        assert effect.body == b""
        assert isinstance(effect.message, Refused | Probed)
        assert not isinstance(effect.message, Probed) or effect.message == Probed(S, 3, False, 0, 0, 0)
    if not isinstance(message[0], Probe):
        assert sum(bench.core.counters.values()) == counted + 1
    # The session goes on as if nothing had been said.
    assert [e.node for e in bench.run(5)] == [AFTER]


@pytest.mark.parametrize("message", every_message(S), ids=lambda value: type(value[0]).__name__)
def test_the_neighbour_before_may_feed_and_nothing_else(message: tuple[Message, bytes]) -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0, 5)
    before = repr(bench.core._sessions[S])
    bench.tell(BEFORE, *message)
    if isinstance(message[0], Step):
        assert len(bench.batch.items) == 1
    else:
        assert repr(bench.core._sessions[S]) == before
        assert bench.work == []


def test_the_head_itself_cannot_feed_a_stage_in_the_middle() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    assert bench.step(0, sender=HEAD) == []
    assert bench.core.counters["not_a_neighbour"] == 1


def test_a_shard_that_was_replaced_cannot_feed_any_more() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    bench.run(0)
    bench.tell(
        HEAD, rewire(1, 1, msgspec.structs.replace(wiring_of(MIDDLE), previous=Neighbour(STRANGER, BEHIND.session)))
    )
    assert bench.step(1, epoch=1, sender=BEFORE) == []
    assert bench.core.counters["not_a_neighbour"] == 1
    bench.step(1, epoch=1, sender=STRANGER)
    assert len(bench.batch.items) == 1
