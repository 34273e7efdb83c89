"""One generation, driven by hand: feeding a pipeline, ends, slow readers, and everything that can go wrong with its shards."""

import os

import pytest

from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, ShardStatus, TokenDelta
from potluck.orchestrator.generation import Generation, Phase
from potluck.planner.cover import Placed
from potluck.wire.messages import (
    Close,
    Credit,
    Fault,
    Neighbour,
    Open,
    Opened,
    Probe,
    Probed,
    Refused,
    Replay,
    Result,
    Rewire,
    Rewired,
    ShardLost,
    Stage,
    Step,
)
from tests.support.generations import HEAD, SPARES, THREE, HeadBench, candidate, node


def steps(bench: HeadBench) -> list[tuple[int, int, bool]]:
    return [(m.position, m.count, m.chooses) for _, m in bench.of(Step)]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- opening and prefill


def test_start_opens_every_stage_with_its_neighbours() -> None:
    bench = HeadBench()
    bench.start()
    opens = [m for _, m in bench.of(Open)]
    assert bench.to(Open) == [1, 2, 3]
    sessions = bench.generation.sessions
    assert [o.wiring.previous and o.wiring.previous.node for o in opens] == [None, node(1), node(2)]  # type: ignore[attr-defined]
    hops = [o.wiring.next for o in opens]  # type: ignore[attr-defined]
    assert [(h.node, h.address, h.session) if h else None for h in hops] == [
        (node(2), "node:2", sessions[1]), (node(3), "node:3", sessions[2]), None,
    ]  # fmt: skip
    assert [o.sampler is not None for o in opens] == [False, False, True]  # type: ignore[attr-defined]
    assert {o.positions for o in opens} == {24}  # type: ignore[attr-defined]
    assert len(set(sessions)) == 3


def test_nothing_is_sent_before_every_stage_is_open() -> None:
    bench = HeadBench()
    opens = bench.start()
    for effect in opens[:2]:
        assert bench.tell(effect.node, Opened(effect.message.session, 0)) == []  # type: ignore[union-attr]
    bench.tell(opens[2].node, Opened(opens[2].message.session, 0))  # type: ignore[union-attr]
    assert bench.to(Step) == [1, 1]


def test_the_prompt_goes_out_in_chunks_a_few_ahead() -> None:
    bench = HeadBench(prompt=9)
    bench.run()
    assert steps(bench) == [(0, 2, False), (2, 2, False)]
    bench.result(2)
    assert steps(bench) == [(4, 2, False)]
    bench.result(6)  # two at once
    assert steps(bench) == [(6, 2, False), (8, 1, True)]


@pytest.mark.parametrize("prompt", [1, 2, 3, 7])
def test_only_the_last_chunk_chooses(prompt: int) -> None:
    bench = HeadBench(prompt=prompt, prefill_window=8)
    bench.run()
    assert [chooses for _, _, chooses in steps(bench)] == [False] * ((prompt - 1) // 2) + [True]
    assert sum(count for _, count, _ in steps(bench)) == prompt


def test_a_tokens_way_round_is_timed_by_the_last_shards_clock_where_it_tells() -> None:
    bench = HeadBench(uses_ring=True)
    timings: list[float] = []
    bench.generation.on_timing = lambda timing: timings.append(timing.total_s)
    bench.run()
    bench.prefill()
    session = bench.generation.sessions[-1]
    bench.now_s = 0.4
    bench.tell(node(3), Result(session, 0, 5, 42, round_us=250_000))  # late by the head's own fault
    bench.now_s = 0.5
    bench.tell(node(3), Result(session, 0, 6, 43))
    assert timings[-2:] == [0.25, pytest.approx(0.1)]


def test_without_a_ring_the_last_shards_clock_counts_the_reader_too_and_is_not_taken() -> None:
    bench = HeadBench(uses_ring=False, ring_credits=1)
    timings: list[float] = []
    bench.generation.on_timing = lambda timing: timings.append(timing.total_s)
    bench.run()
    bench.prefill()
    bench.now_s = 5.0
    bench.read(1)
    bench.now_s = 5.1
    bench.tell(node(3), Result(bench.generation.sessions[-1], 0, 5, 42, round_us=5_100_000))
    assert timings[-1] == pytest.approx(0.1)


def test_tokens_go_round_through_the_head_without_a_ring() -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    assert steps(bench) == [(4, 1, True)]
    assert [e.body for e in bench.sent] == [(100).to_bytes(4, "little")]
    assert bench.kinds(TokenDelta) == [TokenDelta(100, 4)]
    bench.result(5, 42)
    assert steps(bench) == [(5, 1, True)]


def test_with_a_ring_the_head_sends_the_prompt_and_credits_only() -> None:
    bench = HeadBench(uses_ring=True, ring_credits=4)
    bench.run()
    assert [(number, m.tokens) for number, m in bench.of(Credit)] == [(3, 4)]  # type: ignore[attr-defined]
    bench.prefill()
    assert bench.sent == []
    bench.result(5, 42)
    assert bench.read(1) == []
    bench.read(1)
    assert [(number, m.tokens) for number, m in bench.of(Credit)] == [(3, 2)]  # type: ignore[attr-defined]


def test_the_ring_is_wired_from_the_last_to_the_first() -> None:
    bench = HeadBench(uses_ring=True)
    bench.start()
    first, middle, last = [m.wiring for _, m in bench.of(Open)]  # type: ignore[attr-defined]
    assert (first.ring_from, middle.ring_from, last.ring_from) == (
        Neighbour(node(3), bench.generation.sessions[-1]),
        None,
        None,
    )
    assert (first.ring, middle.ring) == (None, None)
    assert (last.ring.node, last.ring.session) == (node(1), bench.generation.sessions[0])


# ---------------------------------------------------------------- ends


def test_an_end_token_stops_and_is_not_shown() -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    bench.result(5, 99)
    assert bench.frames[-1] == Finished("stop", 2, 0)
    assert [f.token for f in bench.kinds(TokenDelta)] == [100]  # type: ignore[union-attr]
    assert bench.closed == [1, 2, 3]


def test_the_limit_ends_it() -> None:
    bench = HeadBench(max_tokens=3)
    bench.run()
    bench.prefill()
    bench.tokens(2)
    assert bench.frames[-1] == Finished("length", 3, 0)
    assert len(bench.kinds(TokenDelta)) == 3


@pytest.mark.parametrize("moment", ["forming", "prefill", "decode", "waiting"])
def test_cancelling_closes_every_stage_and_says_so_once(moment: str) -> None:
    bench = HeadBench(spares=())
    bench.start()
    if moment != "forming":
        bench.answer_all()
    if moment in ("decode", "waiting"):
        bench.prefill()
    if moment == "waiting":
        bench.lose(2)
        assert bench.generation.phase is Phase.WAITING
    bench.cancel()
    assert set(bench.closed) >= ({1, 3} if moment == "waiting" else {1, 2, 3})
    assert bench.frames[-1] == Finished("cancelled", 1 if moment in ("decode", "waiting") else 0, 0)
    count = len(bench.frames)
    assert bench.cancel() == []
    assert bench.result(5, 7) == []
    assert bench.lose(1) == []
    assert bench.wake(100.0) == []
    assert len(bench.frames) == count


# ---------------------------------------------------------------- slow readers


def test_a_reader_that_does_not_read_stops_the_pipeline() -> None:
    bench = HeadBench(ring_credits=2)
    bench.run()
    bench.prefill()
    bench.result(5, 42)
    assert bench.sent == []
    bench.read(1)
    assert steps(bench) == [(5, 1, True)]


@pytest.mark.parametrize("uses_ring", [True, False])
@pytest.mark.parametrize("read", [0, 1, 3, 4])
def test_a_slow_reader_is_nobodys_fault(uses_ring: bool, read: int) -> None:
    """The pipeline stops when it has made what it may; no shard is blamed, however long the reader takes."""
    bench = HeadBench(uses_ring=uses_ring, ring_credits=8, stall_timeout_s=5.0)
    bench.run()
    credit = 8
    bench.prefill()
    for position in range(5, 5 + read):
        bench.result(position, 100)
        bench.read(1)
        credit += sum(m.tokens for _, m in bench.of(Credit))  # type: ignore[attr-defined]
    while len(bench.generation.generated) < 1 + credit if uses_ring else bench.generation._flow.unread < 8:
        bench.result(len(bench.generation.tokens), 100)
    made = len(bench.generation.tokens) - 1
    for second in range(1, 120):
        bench.wake(float(second))
        bench.probed(n1=(made, made), n2=(made, made), n3=(made, made))
    assert bench.kinds(ShardStatus) == []
    assert bench.generation.phase is Phase.RUNNING


def test_a_reader_that_reads_on_after_long_starts_the_clock_anew() -> None:
    bench = HeadBench(ring_credits=2, stall_timeout_s=5.0)
    bench.run()
    bench.prefill()
    bench.result(5, 42)
    bench.wake(30.0)
    bench.now_s = 60.0  # the clock was not looked at for long, twice in a row: this process was stopped too
    bench.read(1)
    bench.wake(60.001)
    bench.probed(n1=(6, 5))
    assert bench.kinds(ShardStatus) == []


def test_reading_part_of_what_came_and_pausing_is_no_stall() -> None:
    bench = HeadBench(uses_ring=True, ring_credits=16, max_tokens=60, stall_timeout_s=5.0)
    bench.run()
    bench.prefill()
    for position in range(5, 21):  # the first token and sixteen on credit
        bench.result(position, 100)
    bench.read(7)  # not enough to be worth a message
    assert bench.sent == []
    for second in range(1, 60):
        bench.wake(float(second))
        bench.probed(n1=(20, 20), n2=(20, 20), n3=(20, 20))
    assert bench.kinds(ShardStatus) == []
    bench.read(1)
    assert bench.to(Credit) == [3]


def signs_of_life(bench: HeadBench, first: int, last: int) -> list[tuple[int, int]]:
    """Probes in the seconds first … last, which nobody answers: when and to whom."""
    signs = []
    for second in range(first, last + 1):
        bench.wake(float(second))
        signs += [(second, number) for number in bench.to(Probe)]
    return signs


def test_shards_hear_now_and_then_of_an_answer_whose_reader_does_not_read() -> None:
    bench = HeadBench(ring_credits=2, stall_timeout_s=5.0)
    bench.run()
    bench.prefill()
    bench.result(5, 42)
    assert signs_of_life(bench, 1, 130) == [(second, number) for second in (60, 120) for number in (1, 2, 3)]
    assert bench.kinds(ShardStatus) == []  # that nobody answers means nothing
    bench.read(1)
    assert steps(bench) == [(5, 1, True)]


def test_those_who_stay_hear_now_and_then_that_a_holder_is_waited_for() -> None:
    bench = decoded(2, spares=(), holder_wait_s=200.0)
    bench.lose(2)
    assert signs_of_life(bench, 1, 130) == [(second, number) for second in (60, 120) for number in (1, 3)]
    assert bench.generation.phase is Phase.WAITING


# ---------------------------------------------------------------- what does not belong


def test_results_of_another_epoch_place_or_sender_change_nothing() -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    sessions = bench.generation.sessions
    strange = [
        (node(3), Result(sessions[2], 1, 5, 7)),  # an epoch that is not
        (node(3), Result(sessions[2], 0, 4, 7)),  # a position that was
        (node(3), Result(sessions[2], 0, 6, 7)),  # and one that cannot be yet
        (node(2), Result(sessions[1], 0, 5, 7)),  # not the last stage
        (node(9), Result(sessions[2], 0, 5, 7)),  # not that session's node
        (node(3), Result(bytes(16), 0, 5, 7)),
        (node(3), Opened(sessions[2], 0)),
        (node(3), Rewired(sessions[2], 0, 0, 0)),
        (node(3), Probed(sessions[2], 77, False, 0, 0, 0)),
        (node(9), Fault(sessions[2], 0, "shard_unavailable", "", node(1))),
        (node(3), Step(sessions[2], 0, 5, 1, 8, "fp32", True)),
        (node(3), Close(sessions[2])),
    ]
    before = repr(bench.generation), len(bench.frames)
    for sender, message in strange:
        assert bench.tell(sender, message) == []
    assert (repr(bench.generation), len(bench.frames)) == before
    assert sum(bench.generation.counters.values()) >= len(strange) - 1


@pytest.mark.parametrize("position", [3, 4, 5, 1 << 20])
def test_a_chunk_confirmed_past_what_was_sent_is_not_believed(position: int) -> None:
    bench = HeadBench(prompt=8)
    bench.run()  # 0-1 and 2-3 are on their way
    bench.result(position)
    if position <= 4:
        return
    assert bench.generation.counters["unexpected_position"] == 1
    assert bench.sent == []


def test_the_last_chunk_without_a_token_is_not_believed() -> None:
    bench = HeadBench()
    bench.run()
    bench.result(2)
    bench.result(4)
    assert bench.generation.counters["unexpected_position"] == 1
    bench.result(4, 7)
    assert bench.kinds(TokenDelta) == [TokenDelta(7, 4)]


def test_a_token_that_the_model_does_not_have_is_rubbish_and_its_shard_is_replaced() -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    bench.result(5, 1000)
    assert bench.places[-1] == (13, 6, 7)
    [status] = bench.kinds(ShardStatus)
    assert status.code == "shard_corruption"  # type: ignore[union-attr]
    assert bench.generation.counters["shard_corruption"] == 1
    assert [f.token for f in bench.kinds(TokenDelta)] == [100]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("logprob", "top"), [(float("nan"), ()), (0.5, ()), (-1.0, ((1000, -1.0),)), (-1.0, ((3, float("nan")),))]
)
def test_log_probabilities_that_are_none_are_rubbish_too(logprob: float, top: tuple[tuple[int, float], ...]) -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    bench.tell(node(3), Result(bench.generation.sessions[-1], 0, 5, 7, logprob, top))
    assert bench.places[-1] == (13, 6, 7)
    assert bench.generation.counters["shard_corruption"] == 1
    assert [f.token for f in bench.kinds(TokenDelta)] == [100]  # type: ignore[union-attr]


# ---------------------------------------------------------------- losses: replay, re-prefill, replacements


def decoded(tokens: int = 3, **changes: object) -> HeadBench:
    """A pipeline that has made the first token and `tokens` more: positions 0 … 3 + tokens are in every KV cache."""
    bench = HeadBench(**changes)  # type: ignore[arg-type]
    bench.run()
    bench.prefill()
    bench.read(1)
    bench.tokens(tokens)
    return bench


def test_a_lost_middle_is_fed_by_replay_and_goes_on_with_the_same_token() -> None:
    bench = decoded(3)
    bench.now_s = 1.0
    bench.lose(2)
    assert bench.places == [(1, 0, 2), (12, 3, 5), (3, 6, 7)]
    assert bench.closed == [2]
    assert bench.to(Open) == [12]
    rewires = dict(bench.of(Rewire))
    assert {number: m.length for number, m in rewires.items()} == {1: 7, 3: 7}  # type: ignore[attr-defined]
    assert rewires[1].wiring.next.node == node(12)  # type: ignore[attr-defined]
    assert rewires[3].wiring.previous.node == node(12)  # type: ignore[attr-defined]
    assert bench.of(Open)[0][1].wiring.forward_from == 7  # type: ignore[attr-defined]
    assert rewires[3].sampler.history == tuple(bench.generation.tokens)  # type: ignore[attr-defined]
    bench.answer_all()
    assert [(number, m.start, m.stop) for number, m in bench.of(Replay)] == [(1, 0, 7)]  # type: ignore[attr-defined]
    assert steps(bench) == [(7, 1, True)]
    bench.now_s = 1.25
    bench.result(8, 42)
    [failover] = bench.kinds(ShardFailover)
    assert isinstance(failover, ShardFailover)
    assert (failover.lost, failover.method, failover.replayed_tokens) == (("02020202:3-5",), "replay", 7)
    assert failover.epoch == 1


def test_a_lost_first_is_fed_from_the_journal() -> None:
    bench = decoded(3)
    bench.lose(1)
    bench.answer_all()
    assert bench.places[0] == (11, 0, 2)
    assert steps(bench) == [(0, 2, False), (2, 2, False), (4, 2, False), (6, 1, False), (7, 1, True)]
    body = b"".join(e.body for e in bench.sent if isinstance(e.message, Step))
    assert body == b"".join(t.to_bytes(4, "little") for t in bench.generation.tokens)
    bench.result(8, 42)
    [failover] = bench.kinds(ShardFailover)
    assert failover.method == "re-prefill"  # type: ignore[union-attr]


def test_a_lost_last_samples_with_the_whole_history() -> None:
    bench = decoded(3)
    bench.lose(3)
    [(number, message)] = bench.of(Open)
    assert number == 13
    assert message.sampler.history == tuple(bench.generation.tokens)  # type: ignore[attr-defined]
    assert message.sampler.prompt_length == 4  # type: ignore[attr-defined]


def test_neighbouring_losses_are_rebuilt_upstream_first() -> None:
    bench = decoded(3)
    bench.lose(2)
    bench.answer_all()
    bench.lose(3)
    bench.answer_all()
    # The replacement of 2 may not have been fed: it is asked, and has nothing.
    assert bench.places == [(1, 0, 2), (12, 3, 5), (13, 6, 7)]


def test_a_survivor_that_knows_less_than_the_journal_is_recomputed() -> None:
    bench = decoded(3)
    bench.lose(3)
    bench.answer_all(lengths={2: 5})
    # A further epoch: 2 starts empty, fed by 1; 13 is fed by what 2 computes.
    assert bench.generation.epoch == 2
    rewires = {number: m.length for number, m in bench.of(Rewire)}  # type: ignore[attr-defined]
    assert rewires == {1: 7, 2: 0, 13: 0} or rewires == {1: 7, 2: 0}
    bench.answer_all()
    assert bench.to(Replay) == [1]


def test_without_outboxes_everything_before_the_loss_is_recomputed_from_the_journal() -> None:
    bench = decoded(3, keeps_outbox=False)
    bench.lose(3)
    assert {number: m.length for number, m in bench.of(Rewire)} == {1: 0, 2: 0}  # type: ignore[attr-defined]
    bench.answer_all()
    assert bench.to(Replay) == []
    assert steps(bench)[0] == (0, 2, False)
    assert steps(bench)[-1] == (7, 1, True)


def test_an_outbox_that_was_dropped_is_learned_of_and_its_shard_recomputed() -> None:
    bench = decoded(3)
    bench.lose(3)
    bench.answer_all(dropped=[2])
    assert bench.generation.epoch == 2
    assert {number: m.length for number, m in bench.of(Rewire)}[2] == 0  # type: ignore[attr-defined]
    bench.answer_all()
    assert bench.to(Replay) == [1]


def test_an_outbox_dropped_during_the_replay_starts_another_epoch() -> None:
    bench = decoded(3)
    bench.lose(3)
    bench.answer_all()
    assert bench.to(Replay) == [2]
    bench.fault(1, "outbox_dropped", 2)
    assert bench.generation.epoch == 2
    assert {number: m.length for number, m in bench.of(Rewire)}[2] == 0  # type: ignore[attr-defined]
    assert bench.kinds(ShardStatus)[1:] == []  # nobody else is lost


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_shard_cannot_keep_the_epochs_coming_by_saying_that_its_outbox_is_gone(stage: int) -> None:
    bench = decoded(3)
    bench.lose(3)
    bench.answer_all()
    for _ in range(20):
        bench.fault(stage, "outbox_dropped", bench.places[stage][0])
        bench.answer_all()
    assert bench.generation.epoch <= 3
    assert bench.generation.phase is Phase.RUNNING
    bench.result(8, 42)
    assert bench.kinds(TokenDelta)[-1] == TokenDelta(42, 8)


def test_several_shards_may_replace_one() -> None:
    bench = decoded(3, spares=((21, 3, 3), (22, 4, 4), (23, 5, 5)))
    bench.lose(2)
    assert bench.places == [(1, 0, 2), (21, 3, 3), (22, 4, 4), (23, 5, 5), (3, 6, 7)]
    opens = {number: m.wiring.forward_from for number, m in bench.of(Open)}  # type: ignore[attr-defined]
    assert opens == {21: 0, 22: 0, 23: 7}  # the new ones feed each other; the survivor behind them has it all
    bench.answer_all()
    assert bench.to(Replay) == [1]


def test_part_of_a_wider_shard_may_replace_one() -> None:
    bench = decoded(3, spares=((20, 0, 7),))
    bench.lose(2)
    assert bench.places == [(1, 0, 2), (20, 3, 5), (3, 6, 7)]
    [(_, message)] = bench.of(Open)
    assert (message.stage.has_embedding, message.stage.has_output, message.sampler) == (False, False, None)  # type: ignore[attr-defined]


def test_two_losses_at_once_are_covered_together() -> None:
    bench = decoded(3, spares=((20, 0, 7),))
    bench.unreachable |= {node(2), node(3)}
    bench.generation.on_lost(node(2), "reset", 0.0)
    bench.lose(3)
    assert [(place[1], place[2]) for place in bench.places] in ([(0, 2), (3, 5), (6, 7)], [(0, 2), (3, 7)])
    bench.answer_all()
    bench.result(8, 42)
    assert len(bench.kinds(ShardFailover)) == 1
    assert len(bench.kinds(ShardStatus)) == 2


def test_all_at_once() -> None:
    bench = decoded(3, spares=((20, 0, 7),))
    for number in (1, 2, 3):
        bench.unreachable.add(node(number))
    for number in (1, 2, 3):
        bench.lose(number)
    bench.answer_all()
    assert [place[0] for place in bench.places] == [20] * len(bench.places)
    assert steps(bench)[-1] == (7, 1, True)
    assert len({*bench.generation.sessions}) == len(bench.places)


def test_what_the_ring_chose_and_the_head_never_saw_is_cut_off() -> None:
    bench = decoded(3, uses_ring=True)
    bench.lose(2)
    # Stage 1 may hold token 8 already, from the ring: the journal has 8 tokens, positions 0 … 6 are confirmed.
    assert {number: m.length for number, m in bench.of(Rewire)} == {1: 7, 3: 7}  # type: ignore[attr-defined]
    bench.answer_all()
    assert steps(bench) == [(7, 1, True)]


def test_a_loss_while_an_epoch_is_being_formed_starts_another() -> None:
    bench = decoded(3)
    bench.lose(2)
    bench.lose(3)
    assert bench.generation.epoch == 2
    # The replacement of 2 had been asked and not answered: it is asked anew, under another name.
    assert 12 in bench.closed
    assert sorted(bench.to(Open)) == [12, 13]
    bench.answer_all()
    bench.result(8, 42)
    assert bench.frames[-1] == TokenDelta(42, 8)


def test_a_refusal_is_answered_by_another_choice() -> None:
    bench = HeadBench()
    bench.start()
    bench.refuse(1, "kv_budget_exceeded")
    [status] = [frame for frame in bench.frames if isinstance(frame, ShardStatus)]
    assert (status.status, status.code, status.reason) == ("degraded", "kv_budget_exceeded", "refused: words")
    assert bench.places == [(1, 0, 2), (12, 3, 5), (3, 6, 7)]
    bench.answer_all()
    assert bench.generation.phase is Phase.FORMING or bench.to(Step)


def test_every_session_on_a_node_that_refused_one_is_closed() -> None:
    """Both ends on one node: where it refuses one of them, the other must not be left behind."""
    bench = HeadBench(((1, 0, 7), (2, 3, 5)), ((20, 0, 7),))
    bench = HeadBench(((1, 0, 2), (2, 3, 5), (1, 6, 7)), ((20, 0, 7),))
    bench.start()
    assert bench.to(Open) == [1, 2, 1]
    bench.refuse(2)
    assert bench.closed.count(1) == 2
    assert [place[0] for place in bench.places] == [20, 2, 20]


# ---------------------------------------------------------------- faults


def test_a_fault_names_its_culprit_and_that_one_is_replaced() -> None:
    bench = decoded(2)
    bench.fault(1, "shard_corruption", 1)  # 2 says that what 1 sent is rubbish
    assert bench.places[0][0] == 11
    assert bench.generation.counters["shard_corruption"] == 1
    [status] = bench.kinds(ShardStatus)
    assert (status.node, status.code) == (node(1).hex(), "shard_corruption")  # type: ignore[union-attr]


def test_a_shard_that_reports_rubbish_of_one_neighbour_after_the_other_goes_itself() -> None:
    bench = decoded(2, spares=(*SPARES, (21, 0, 2), (31, 0, 2)))
    bench.fault(1, "shard_corruption", 1)
    bench.answer_all()
    bench.fault(1, "shard_corruption", 11)
    assert [place[0] for place in bench.places] == [21, 12, 3]
    bench.answer_all()
    bench.result(7, 42)
    assert bench.frames[-1] == TokenDelta(42, 7)


@pytest.mark.parametrize(("accuser", "accused"), [(2, 1), (1, 3), (0, 2)])
def test_rubbish_that_a_shard_cannot_have_seen_is_its_own(accuser: int, accused: int) -> None:
    bench = decoded(2)
    bench.fault(accuser, "shard_corruption", accused)
    assert [place[0] for place in bench.places] == [n + 10 if n == accuser + 1 else n for n in (1, 2, 3)]


MANY_SPARES = (*SPARES, (21, 0, 2), (31, 0, 2), (22, 3, 5), (23, 6, 7), (33, 6, 7))
REPORTS = ("shard_unavailable", "bad_request")


@pytest.mark.parametrize("code", REPORTS)
@pytest.mark.parametrize(
    ("uses_ring", "accuser", "accused"), [(False, 0, 3), (False, 2, 1), (True, 0, 3), (True, 2, 1)]
)
def test_only_a_neighbour_is_lost_for_what_a_shard_says(code: str, uses_ring: bool, accuser: int, accused: int) -> None:
    """The ring makes neighbours of the first and the last."""
    bench = HeadBench(uses_ring=uses_ring)
    bench.run()
    bench.fault(accuser, code, accused)
    gone = accused if uses_ring else accuser + 1
    assert [place[0] for place in bench.places] == [n + 10 if n == gone else n for n in (1, 2, 3)]


@pytest.mark.parametrize("code", REPORTS)
def test_a_shard_that_says_of_one_neighbour_after_another_that_it_is_gone_goes_itself(code: str) -> None:
    bench = decoded(2, spares=MANY_SPARES)
    bench.fault(1, code, 1)
    assert [place[0] for place in bench.places] == [11, 2, 3]
    bench.answer_all()
    bench.fault(1, code, 3)
    assert [place[0] for place in bench.places] == [11, 12, 13]
    bench.answer_all()
    bench.result(7, 42)
    assert bench.frames[-1] == TokenDelta(42, 7)


def test_a_shard_whose_neighbours_are_lost_one_after_another_stays_where_the_head_finds_them_lost_too() -> None:
    bench = decoded(2, spares=MANY_SPARES)
    for lost in (3, 13, 23):
        assert bench.places[2][0] == lost
        bench.fault(1, "shard_unavailable", lost)
        bench.answer_all()
        bench.lose(lost)  # a little later
    assert [place[0] for place in bench.places] == [1, 2, 33]


def test_a_shard_that_nobody_can_stand_in_for_stays_however_unlucky_it_is() -> None:
    bench = decoded(2, spares=((11, 0, 2), (21, 0, 2), (13, 6, 7)))
    bench.fault(1, "shard_unavailable", 1)
    bench.answer_all()
    bench.fault(1, "shard_unavailable", 3)
    assert [place[0] for place in bench.places] == [11, 2, 13]
    assert bench.generation.phase is Phase.FORMING


def test_who_reports_a_loss_that_is_known_is_not_doubted_for_it() -> None:
    bench = decoded(2, spares=((12, 3, 5), (11, 0, 2)))
    bench.lose(3)
    assert bench.generation.phase is Phase.WAITING
    bench.fault(1, "shard_unavailable", 3)  # of the same epoch still
    bench.unreachable.clear()
    bench.generation.on_returned(node(3), 0.0)
    bench.fault(1, "shard_unavailable", 1)  # its first
    assert [place[0] for place in bench.places] == [11, 2, 3]


def test_rubbish_without_a_spare_ends_it_after_the_wait_and_the_sender_is_not_taken_back() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.fault(1, "shard_corruption", 1)
    for tenth in range(1, 60):
        bench.wake(tenth / 10)
        assert bench.to(Open) == []
    assert isinstance(bench.frames[-1], PipelineAborted)
    assert bench.frames[-1].generated_tokens == 3


def test_a_second_piece_of_the_same_rubbish_is_not_held_against_whoever_reports_it() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.fault(1, "shard_corruption", 1)
    bench.fault(1, "shard_corruption", 1)  # of the same epoch still
    assert [status.node for status in bench.kinds(ShardStatus)] == [node(1).hex()]  # type: ignore[union-attr]


def test_who_sent_rubbish_is_not_taken_back_for_a_new_link_either() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.fault(1, "shard_corruption", 1)
    bench.generation.on_returned(node(1), 0.1)
    assert bench.generation.phase is Phase.WAITING


def test_a_stale_accusation_is_not_heard() -> None:
    bench = decoded(2)
    bench.lose(2)
    bench.answer_all()
    bench.fault(0, "shard_unavailable", 3, epoch=0)
    assert bench.places[2][0] == 3
    assert bench.generation.counters["stale_epoch"] == 1


def test_a_shard_that_says_itself_that_it_is_gone_is_believed_in_any_epoch() -> None:
    bench = decoded(2)
    bench.lose(2)
    bench.answer_all()
    bench.fault(2, "shard_unavailable", 3, epoch=0)
    assert bench.places[2][0] == 13


def test_a_shard_that_blames_the_head_is_replaced_and_cannot_end_the_answer() -> None:
    bench = decoded(2)
    bench.fault(0, "bad_request", HEAD)
    assert bench.places[0][0] == 11
    bench.answer_all()
    bench.result(7, 42)
    assert bench.frames[-1] == TokenDelta(42, 7)


def test_where_every_shard_blames_the_head_its_words_end_the_answer() -> None:
    bench = decoded(2, spares=(), holder_wait_s=1.0)
    bench.fault(0, "bad_request", HEAD)
    bench.wake(1.5)
    assert bench.frames[-1] == PipelineAborted("bad_request", "words", 3)


def test_a_worker_lost_on_the_heads_own_shard_is_a_loss_like_any_other() -> None:
    bench = HeadBench()
    own = candidate((ord("H"), 0, 2))
    bench = HeadBench(((ord("H"), 0, 2), (2, 3, 5), (3, 6, 7)))
    assert own.node == HEAD
    bench.run()
    bench.prefill()
    bench.fault(0, "shard_unavailable", HEAD)
    assert bench.places[0][0] == 11
    assert not bench.generation.is_ended


# ---------------------------------------------------------------- probes, verdicts, stalls


def test_no_probe_while_there_is_progress() -> None:
    bench = decoded(2, probe_after_s=0.25)
    bench.now_s = 0.2
    bench.tokens(1)
    assert bench.wake(0.3) == []


def test_silence_is_probed_at_every_stage() -> None:
    bench = decoded(2)
    bench.wake(0.3)
    assert bench.to(Probe) == [1, 2, 3]


def test_the_deadline_follows_the_usual_step() -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    bench.read(1)
    for _ in range(30):  # a token a second
        bench.now_s += 1.0
        position = len(bench.generation.tokens)
        if bench.generation.is_ended:
            break
        bench.result(position, 1)
        bench.read(1)
        if len(bench.generation.tokens) == 20:
            break
    start = bench.now_s
    assert bench.wake(start + 3.0) == []
    assert bench.wake(start + 6.5) != []


def test_who_does_not_answer_a_probe_is_gone() -> None:
    bench = decoded(2)
    probes = bench.wake(0.3)
    for effect in probes:
        if effect.node != node(2):
            bench.tell(effect.node, Probed(effect.message.session, effect.message.nonce, True, 0, 6, 6))  # type: ignore[union-attr]
    assert bench.wake(0.5) == []
    bench.wake(0.9)
    assert bench.places[1][0] == 12


@pytest.mark.parametrize(("is_known", "idle_us"), [(False, 0), (True, 600_000)])
def test_who_does_not_know_the_session_or_has_a_silent_worker_is_gone(is_known: bool, idle_us: int) -> None:
    bench = decoded(2)
    for effect in bench.wake(0.3):
        is_it = effect.node == node(2)
        answer = Probed(
            effect.message.session, effect.message.nonce, is_known if is_it else True, idle_us if is_it else 0, 6, 6  # type: ignore[union-attr]
        )  # fmt: skip
        bench.tell(effect.node, answer)
    assert bench.places[1][0] == 12


def test_a_shard_that_is_still_loading_is_given_time() -> None:
    bench = HeadBench(stall_timeout_s=30.0)
    opens = bench.start()
    for effect in opens[:2]:
        bench.tell(effect.node, Opened(effect.message.session, 0))  # type: ignore[union-attr]
    for tenth in range(3, 200):
        probes = bench.wake(tenth / 10)
        for effect in probes:
            is_loading = effect.node == node(3)
            bench.tell(effect.node, Probed(effect.message.session, effect.message.nonce, not is_loading, 0, 0, 0))  # type: ignore[union-attr]
    assert bench.kinds(ShardStatus) == []


def start_loading(bench: HeadBench, until_s: float) -> None:
    """Every shard but the third opens and answers; that one answers too, and opens nothing."""
    for effect in bench.start():
        if effect.node != node(3):
            bench.tell(effect.node, Opened(effect.message.session, 0))  # type: ignore[union-attr]
    while bench.now_s < until_s and not bench.generation.is_ended and bench.kinds(ShardStatus) == []:
        for effect in bench.wake(bench.now_s + 0.3):
            if isinstance(effect.message, Probe):
                is_known = effect.node != node(3)
                bench.tell(effect.node, Probed(effect.message.session, effect.message.nonce, is_known, 0, 0, 0))


def test_a_shard_that_loads_for_minutes_is_waited_for_where_nobody_else_has_its_layers() -> None:
    bench = HeadBench(stall_timeout_s=5.0, spares=())
    start_loading(bench, until_s=49.0)
    assert bench.kinds(ShardStatus) == []
    bench.tell(node(3), Opened(bench.generation.sessions[-1], 0))
    assert bench.generation.phase is Phase.RUNNING


def test_a_shard_that_loads_for_minutes_is_replaced_where_somebody_else_has_its_layers_and_not_waited_for_for_ever() -> (
    None
):
    bench = HeadBench(stall_timeout_s=5.0, spares=((13, 6, 7),))
    start_loading(bench, until_s=20.0)
    assert 5.0 <= bench.now_s < 6.0
    assert bench.places[2][0] == 13
    alone = HeadBench(stall_timeout_s=5.0, spares=())
    start_loading(alone, until_s=60.0)
    assert 50.0 <= alone.now_s < 51.5
    assert [status.code for status in alone.kinds(ShardStatus)] == ["pipeline_stalled"]  # type: ignore[union-attr]


def test_a_shard_that_loads_for_minutes_is_not_waited_for_where_one_that_failed_before_may_be_well_again() -> None:
    bench = HeadBench(stall_timeout_s=5.0, spares=((13, 6, 7),))
    bench.run()
    for effect in bench.fault(2, "shard_unavailable", 3):  # its worker died; the node is there
        if isinstance(effect.message, Rewire):
            bench.tell(effect.node, Rewired(effect.message.session, 1, effect.message.length, 0))
    assert bench.places[2][0] == 13
    while bench.now_s < 20.0 and bench.places[2][0] == 13:
        for effect in bench.wake(bench.now_s + 0.3):
            if isinstance(effect.message, Probe):
                is_known = effect.node != node(13)
                bench.tell(effect.node, Probed(effect.message.session, effect.message.nonce, is_known, 0, 0, 0))
    assert bench.places[2][0] == 3
    assert bench.now_s < 7.0


def slow_prompt(bench: HeadBench, until_s: float, **kept: int) -> None:
    """No result for long; every shard answers, and takes one position more each second; or `kept`, with so many other batches."""
    bench.run()
    while bench.now_s < until_s and bench.kinds(ShardStatus) == []:
        for effect in bench.wake(bench.now_s + 0.3):
            if isinstance(effect.message, Probe):
                position_in, done = (9, 0) if kept else (min(9, int(bench.now_s)), int(bench.now_s) // 2)
                batches = int(bench.now_s) * kept.get("batches", 0)
                answer = Probed(effect.message.session, effect.message.nonce, True, 0, position_in, done, batches)
                bench.tell(effect.node, answer)


def test_a_slow_prompt_is_no_stall_as_long_as_it_gets_on() -> None:
    bench = HeadBench(prompt=20, prefill_chunk=9, stall_timeout_s=5.0)
    slow_prompt(bench, until_s=15.0)
    assert bench.kinds(ShardStatus) == []
    bench.result(9)
    bench.now_s += 0.01
    assert bench.generation.phase is Phase.RUNNING


def test_a_prompt_that_waits_for_other_sessions_is_no_stall_as_long_as_they_get_on() -> None:
    bench = HeadBench(prompt=20, prefill_chunk=9, stall_timeout_s=5.0)
    slow_prompt(bench, until_s=40.0, batches=1)
    assert bench.kinds(ShardStatus) == []
    alone = HeadBench(prompt=20, prefill_chunk=9, stall_timeout_s=5.0)
    slow_prompt(alone, until_s=40.0, batches=0)
    assert 5.0 <= alone.now_s < 6.5
    for_ever = HeadBench(prompt=20, prefill_chunk=9, stall_timeout_s=5.0)
    slow_prompt(for_ever, until_s=90.0, batches=1)
    assert 50.0 <= for_ever.now_s < 57.0


def test_a_worker_that_freezes_while_a_session_is_opened_is_found_long_before_the_stall_timeout() -> None:
    bench = decoded(3, stall_timeout_s=30.0, spares=((12, 3, 5), (22, 3, 5)))
    bench.lose(2)
    for effect in list(bench.sent):
        if isinstance(effect.message, Rewire):
            bench.tell(effect.node, Rewired(effect.message.session, 1, effect.message.length, 0))
    second = 0.0
    while not bench.kinds(ShardStatus)[1:] and second < 30:
        second += 0.3
        for effect in bench.wake(second):
            is_frozen = effect.node == node(12)
            idle_us = int(second * 1e6) if is_frozen else 0
            if isinstance(effect.message, Probe):
                bench.tell(effect.node, Probed(effect.message.session, effect.message.nonce, True, idle_us, 7, 7))
    assert 2.0 <= second < 3.5
    assert bench.places[1] == (22, 3, 5)


def test_a_stall_while_forming_is_blamed_on_who_has_not_answered() -> None:
    bench = decoded(3, stall_timeout_s=5.0, spares=((12, 3, 5), (22, 3, 5)))
    bench.lose(2)
    for effect in list(bench.sent):
        if isinstance(effect.message, Rewire):
            bench.tell(effect.node, Rewired(effect.message.session, 1, effect.message.length, 0))
    second = 0.0
    while not bench.kinds(ShardStatus)[1:] and second < 20:
        second += 0.3
        bench.wake(second)
        bench.probed(n1=(7, 7), n3=(7, 7), n12=(0, 0))
    assert [status.node for status in bench.kinds(ShardStatus)] == [node(2).hex(), node(12).hex()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("positions", "culprit"),
    [
        ({"n1": (7, 6), "n2": (6, 6), "n3": (6, 6)}, 1),  # took it, gave nothing
        ({"n1": (6, 6), "n2": (6, 6), "n3": (6, 6)}, 1),  # never took what the head sent
        ({"n1": (7, 7), "n2": (7, 6), "n3": (6, 6)}, 2),
        ({"n1": (7, 7), "n2": (6, 6), "n3": (6, 6)}, 1),  # says that it gave; nobody got it
        ({"n1": (7, 7), "n2": (7, 7), "n3": (7, 6)}, 3),
        ({"n1": (7, 7), "n2": (7, 7), "n3": (7, 7)}, 3),  # computed, and never told the head
    ],
)
def test_a_stall_is_located(positions: dict[str, tuple[int, int]], culprit: int) -> None:
    bench = decoded(2, stall_timeout_s=5.0)  # position 6 is on its way
    second = 0.0
    while not bench.kinds(ShardStatus) and second < 20:
        second += 0.3
        bench.wake(second)
        bench.probed(**positions)
    [status] = bench.kinds(ShardStatus)
    assert status.node == node(culprit).hex()  # type: ignore[union-attr]
    assert second >= 5.0


def stall(bench: HeadBench, **positions: tuple[int, int]) -> str:
    """Time passes until somebody else is blamed; who that is."""
    before = len(bench.kinds(ShardStatus))
    limit_s = bench.now_s + 60
    while len(bench.kinds(ShardStatus)) == before and bench.now_s < limit_s:
        bench.wake(bench.now_s + 0.3)
        bench.probed(**positions)
    return bench.kinds(ShardStatus)[-1].node[:2]  # type: ignore[union-attr]


def test_where_one_says_it_gave_and_the_other_that_it_got_nothing_the_giver_goes_first_and_then_the_taker() -> None:
    bench = decoded(2, stall_timeout_s=5.0)
    assert stall(bench, n1=(7, 7), n2=(6, 6), n3=(6, 6)) == "01"
    bench.answer_all()
    assert stall(bench, n11=(7, 7), n2=(6, 6), n3=(6, 6)) == "02"
    assert bench.places == [(11, 0, 2), (12, 3, 5), (3, 6, 7)]


def test_a_long_feed_is_no_stall_while_it_moves_and_is_not_believed_for_ever() -> None:
    bench = decoded(10, prompt=400, stall_timeout_s=5.0)
    bench.lose(2)
    bench.answer_all()
    second = 0.0
    while not bench.kinds(ShardStatus)[1:] and second < 200:
        second += 0.3
        bench.wake(second)
        bench.probed(n1=(410, 410), n12=(int(second), int(second)), n3=(410, 410))
    assert 50 <= second < 70  # ten times the timeout, although it claims to go on

    bench = decoded(10, prompt=400, stall_timeout_s=5.0)
    bench.lose(2)
    bench.answer_all()
    second = 0.0
    while not bench.kinds(ShardStatus)[1:] and second < 200:
        second += 0.3
        bench.wake(second)
        bench.probed(n1=(410, 410), n12=(1000 + int(second), 1000), n3=(410, 410))
    assert 5 <= second < 7  # nobody can have more than there is

    bench = decoded(10, prompt=400, stall_timeout_s=5.0)
    bench.lose(2)
    bench.answer_all()
    second = 0.0
    while not bench.kinds(ShardStatus)[1:] and second < 200:
        second += 0.3
        bench.wake(second)
        bench.probed(n1=(410, 410), n12=(3, 2), n3=(410, 410))
    assert 5 <= second < 7


@pytest.mark.parametrize("step_us", [10**15, -(10**15)])
def test_what_a_shard_claims_of_its_speed_does_not_keep_silence_from_being_looked_into(step_us: int) -> None:
    bench = HeadBench()
    claims = [Placed(p.node, p.address, p.stage, step_us) for p in bench.generation.stages]
    bench.generation = Generation(
        bench.generation.request, claims, bench._repick, bench.generation.settings, lambda: os.urandom(16), HEAD
    )
    bench.start()
    due_s = bench.generation.next_wake_s()
    assert 0.2 <= due_s <= 10.0
    assert bench.wake(due_s) != []


def test_a_head_that_was_stopped_asks_again_before_it_blames_anybody() -> None:
    bench = decoded(2)
    bench.wake(0.3)
    assert bench.to(Probe) == [1, 2, 3]
    bench.wake(60.0)  # the answers lie in its sockets, unread
    assert bench.kinds(ShardStatus) == []
    assert bench.to(Probe) == [1, 2, 3]
    bench.probed()
    assert bench.kinds(ShardStatus) == []
    bench.wake(120.0)  # late again; but now it has slept enough
    bench.wake(120.6)
    assert len(bench.kinds(ShardStatus)) == 3


def test_a_head_that_is_late_every_time_still_finds_the_dead() -> None:
    bench = decoded(2)
    for wake in range(1, 5):
        bench.wake(wake * 10.0)
    assert len(bench.kinds(ShardStatus)) == 3


def test_time_in_which_the_head_did_not_run_is_no_time_waited_for_a_holder() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.lose(2)
    bench.wake(0.5)
    bench.wake(60.0)
    assert bench.generation.phase is Phase.WAITING
    bench.wake(61.0)
    bench.unreachable.clear()
    bench.generation.on_returned(node(2), 61.1)
    assert bench.generation.phase is Phase.FORMING


def test_a_stall_without_a_spare_ends_with_its_own_code() -> None:
    bench = decoded(2, spares=(), stall_timeout_s=5.0, holder_wait_s=2.0)
    second = 0.0
    while not bench.generation.is_ended and second < 60:
        second += 0.3
        bench.wake(second)
        bench.answer_all() if bench.to(Open) else bench.probed(n1=(7, 6))
    assert isinstance(bench.frames[-1], PipelineAborted)
    assert bench.frames[-1].code == "pipeline_stalled"


# ---------------------------------------------------------------- waiting for a holder


def test_without_a_holder_the_stream_stays_open_for_a_while_and_ends_with_a_code() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.lose(2)
    assert bench.generation.phase is Phase.WAITING
    assert bench.closed == [2]  # the survivors keep their KV
    for tenth in range(1, 50):
        bench.wake(tenth / 10)
        assert not bench.generation.is_ended
    bench.wake(5.1)
    assert bench.frames[-1] == PipelineAborted("shard_unavailable", "no shard covers some layers", 3)
    assert sorted(bench.closed) == [1, 2, 3]


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("kv_budget_exceeded", ("kv_budget_exceeded", "words")),
        ("weights_mismatch", ("weights_mismatch", "words")),
        ("shard_corruption", ("shard_unavailable", "nobody else holds some layers: words")),
    ],
)
def test_an_answer_ends_with_what_its_only_holder_said(code: str, end: tuple[str, str]) -> None:
    bench = decoded(2, spares=(), holder_wait_s=1.0)
    bench.fault(1, code, 2)
    bench.wake(1.5)
    assert bench.frames[-1] == PipelineAborted(*end, 3)


def test_an_answer_ends_with_what_was_wrong_with_its_last_result() -> None:
    bench = decoded(2, spares=(), holder_wait_s=1.0)
    session, epoch = bench.generation.sessions[-1], bench.generation.epoch
    bench.tell(node(3), Result(session, epoch, 7, 5000))  # past the vocabulary
    bench.wake(1.5)
    assert isinstance(bench.frames[-1], PipelineAborted)
    assert (bench.frames[-1].code, "nobody else" in bench.frames[-1].message) == ("shard_unavailable", True)


def test_a_loss_that_is_known_already_is_no_news() -> None:
    bench = decoded(2, spares=())
    bench.lose(2)
    for _ in range(5):
        assert bench.lose(2) == []  # a Close that could not be delivered comes back as a loss
        bench.fault(0, "shard_unavailable", 2)
    assert len(bench.kinds(ShardStatus)) == 1


def test_it_goes_on_when_the_holder_is_back_with_nothing() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.lose(2)
    old = bench.generation.sessions[1]
    bench.unreachable.clear()
    bench.now_s = 2.0
    bench.generation.on_returned(node(2), 2.0)
    bench._take()
    assert bench.to(Open) == [2]  # it was restarted: it knows nothing of the session, and gets a new one
    assert bench.generation.sessions[1] != old
    bench.answer_all()
    assert bench.to(Replay) == [1]
    bench.result(7, 42)
    assert bench.frames[-1] == TokenDelta(42, 7)


def test_a_worker_that_is_restarted_in_its_place_is_found_without_a_new_link() -> None:
    bench = decoded(2, spares=(), holder_wait_s=5.0)
    bench.fault(1, "shard_unavailable", 2)  # the worker died; its daemon is there
    assert bench.generation.phase is Phase.WAITING
    assert bench.generation.next_wake_s() <= 0.5
    bench.wake(0.6)
    assert bench.to(Open) == [2]
    bench.answer_all()
    bench.result(7, 42)
    assert bench.frames[-1] == TokenDelta(42, 7)


def test_the_wait_ends_even_where_somebody_keeps_refusing() -> None:
    bench = decoded(2, spares=(), holder_wait_s=3.0)
    bench.fault(1, "shard_unavailable", 2)
    tenth = 0
    while not bench.generation.is_ended and tenth < 100:
        tenth += 1
        bench.wake(tenth / 10)
        if bench.to(Open):
            bench.refuse(1)
    assert bench.frames[-1] == PipelineAborted("shard_unavailable", "words", 3)
    assert 30 <= tenth <= 36


def test_an_old_stall_does_not_name_a_later_end() -> None:
    bench = decoded(2, spares=((12, 3, 5),), stall_timeout_s=5.0, holder_wait_s=1.0)
    second = 0.0
    while not bench.kinds(ShardStatus):
        second += 0.3
        bench.wake(second)
        bench.probed(n1=(7, 7), n2=(7, 6))
    bench.answer_all()
    bench.result(7, 42)
    bench.lose(1)
    bench.wake(second + 1.5)
    assert isinstance(bench.frames[-1], PipelineAborted)
    assert bench.frames[-1].code == "shard_unavailable"


def test_ones_own_copy_is_used_after_fruitless_recoveries_or_where_nobody_else_is_left() -> None:
    bench = decoded(2, spares=())
    bench.local = [candidate((ord("H"), 0, 7))]
    assert not bench.generation.fell_back
    bench.lose(2)
    assert bench.places == [(1, 0, 2), (ord("H"), 3, 5), (3, 6, 7)]
    assert bench.generation.fell_back
    bench.answer_all()
    bench.result(7, 42)
    assert bench.frames[-1] == TokenDelta(42, 7)


def test_a_coordinators_own_layers_are_no_fallback_when_another_shard_is_replaced() -> None:
    bench = HeadBench(offers=((ord("H"), 0, 2), (2, 3, 5), (3, 6, 7)))
    bench.run()
    bench.prefill()
    bench.lose(2)
    assert bench.places == [(ord("H"), 0, 2), (12, 3, 5), (3, 6, 7)]
    assert not bench.generation.fell_back


# ---------------------------------------------------------------- the same text, whatever fails


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("uses_ring", [True, False])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_no_token_is_lost_doubled_or_out_of_place(lost: int, uses_ring: bool, when: str) -> None:
    bench = HeadBench(uses_ring=uses_ring)
    bench.run()
    if when == "decode":
        bench.prefill()
        bench.read(1)
        bench.tokens(2)
    else:
        bench.result(2)
    bench.lose(lost)
    bench.answer_all()
    while len(bench.generation.tokens) < 12:
        position = len(bench.generation.tokens)
        if position == 4 and when == "prefill":
            bench.result(4, 104)
        else:
            bench.result(position, 100 + position)
        bench.read(1)
    deltas = bench.kinds(TokenDelta)
    assert [d.position for d in deltas] == list(range(4, 12))  # type: ignore[union-attr]
    assert len(bench.kinds(ShardFailover)) == 1


def test_refused_messages_of_a_renamed_session_are_not_heard() -> None:
    bench = HeadBench()
    opens = bench.start()
    old = opens[1].message.session  # type: ignore[union-attr]
    bench.refuse(0)
    assert bench.generation.sessions[1] != old
    before = bench.places
    bench.tell(node(2), Refused(old, 0, "shard_unavailable", "late"))
    bench.tell(node(2), Opened(old, 0))
    assert bench.places == before
    assert SPARES[0] in bench.places
    assert THREE[0] not in bench.places


# ---------------------------------------------------------------- news for those who stay


def test_a_loss_is_told_to_those_who_stay_and_to_nobody_else() -> None:
    bench = HeadBench()
    bench.run()
    bench.prefill()
    bench.lose(2)
    told = bench.of(ShardLost)
    assert [number for number, _ in told] == [1, 3]
    sessions = [bench.generation.sessions[0], bench.generation.sessions[-1]]
    assert [news for _, news in told] == [
        ShardLost(session, node(2), "m", Stage(3, 6), "connection lost: reset") for session in sessions
    ]


def test_a_node_with_two_stages_is_told_once() -> None:
    bench = HeadBench(((1, 0, 2), (2, 3, 5), (1, 6, 7)))
    bench.run()
    bench.lose(2)
    assert bench.to(ShardLost) == [1]


def test_a_shard_that_refuses_is_not_called_lost() -> None:
    bench = HeadBench()
    bench.start()
    bench.refuse(1)
    assert bench.to(ShardLost) == []
    assert len(bench.kinds(ShardStatus)) == 1


# ---------------------------------------------------------------- an answer that was begun elsewhere


def test_an_answer_that_was_begun_is_fed_as_if_it_were_prompt_and_goes_on_after_it() -> None:
    bench = HeadBench(prompt=3, prefill_window=8, asked={"begun": (50, 51), "resume_key": b"k" * 32})
    bench.start()
    opens = [m for _, m in bench.of(Open)]
    assert [o.resume_key for o in opens] == [b"", b"", b"k" * 32]  # type: ignore[attr-defined]
    sampler = opens[-1].sampler  # type: ignore[attr-defined]
    assert (sampler.history, sampler.prompt_length, sampler.limit) == ((0, 1, 2, 50, 51), 3, 23)
    bench.answer_all()
    assert steps(bench) == [(0, 2, False), (2, 2, False), (4, 1, True)]
    bench.result(5, 52)
    assert [frame.token for frame in bench.kinds(TokenDelta)] == [52]  # type: ignore[union-attr]
    assert bench.generation.generated == [50, 51, 52]
    assert bench.generation.answer == (3, (0, 1, 2, 50, 51, 52))


def test_what_was_begun_counts_towards_the_limit() -> None:
    bench = HeadBench(prompt=2, max_tokens=3, prefill_window=8, asked={"begun": (50, 51)})
    bench.run()
    bench.result(4, 52)
    assert bench.kinds(Finished) == [Finished("length", 3, 0)]


def test_a_shard_that_dies_under_a_begun_answer_is_replaced_with_all_of_it() -> None:
    bench = HeadBench(prompt=3, prefill_window=8, asked={"begun": (50, 51)})
    bench.run()
    bench.result(5, 52)
    bench.lose(3)
    [(_, opened)] = bench.of(Open)
    assert opened.sampler.history == (0, 1, 2, 50, 51, 52)  # type: ignore[attr-defined]
    assert opened.sampler.prompt_length == 3  # type: ignore[attr-defined]
