"""Steps belong to a session of their sender's, not to the sender alone; and what else a shard passes on or makes of a head's words."""

import msgspec
import pytest

from potluck.shard.core import Suspect
from potluck.wire.messages import Replay, Result, ShardLost, Stage, Step
from potluck.wire.work import BatchDone, WorkOutput
from tests.support.shard_cores import (
    AFTER,
    AHEAD,
    BEFORE,
    FIRST,
    HEAD,
    LAST,
    MIDDLE,
    OTHER_HEAD,
    SHARD,
    CoreBench,
    sampler_of,
    session_id,
    wiring_of,
)

S = session_id(1)


def test_a_neighbour_cannot_be_made_to_feed_by_another_head() -> None:
    """It is the right node; what it sends belongs to another session of its own, whose head has named ours as the next."""
    bench = CoreBench(MIDDLE)
    bench.open()
    for source in (None, session_id(77), S):
        assert bench.step(0, source=source) == []
    assert bench.core.counters["not_a_neighbour"] == 3
    bench.step(0)
    assert len(bench.batch.items) == 1


def test_a_head_that_serves_others_cannot_be_made_to_speak_as_the_head() -> None:
    bench = CoreBench(FIRST)
    bench.open()
    assert bench.step(0, sender=HEAD, source=session_id(77)) == []
    assert bench.core.counters["not_a_neighbour"] == 1
    bench.step(0, sender=HEAD)
    assert len(bench.batch.items) == 1


def test_the_last_shard_cannot_be_made_to_feed_another_ring() -> None:
    bench = CoreBench(FIRST)
    bench.open(wiring=wiring_of(FIRST, ring=True))
    bench.run(0, 4)
    assert bench.step(4, sender=AFTER, source=session_id(77)) == []
    assert bench.step(4, sender=AFTER) == []
    assert bench.core.counters["not_a_neighbour"] == 2
    bench.step(4, sender=AFTER, source=AHEAD.session)
    assert len(bench.batch.items) == 1


@pytest.mark.parametrize("stage", [MIDDLE, FIRST])
def test_a_shard_says_from_which_session_it_sends(stage: Stage) -> None:
    bench = CoreBench(stage)
    bench.open(head=OTHER_HEAD)
    sender = OTHER_HEAD if stage is FIRST else BEFORE
    [effect] = bench.run(0, 4, sender=sender)
    assert isinstance(effect.message, Step)
    assert effect.message.source == S
    [again] = bench.tell(OTHER_HEAD, Replay(S, 0, 0, 4))
    assert isinstance(again.message, Step)
    assert again.message.source == S


# ---------------------------------------------------------------- what a head says of others


def suspects(bench: CoreBench, sender: bytes, node: bytes) -> list[Suspect]:
    bench.core.on_message(sender, ShardLost(S, node, "m", LAST, "gone"), b"", bench.now_s, 0)
    return [effect for effect in bench.core.take_effects() if isinstance(effect, Suspect)]


def test_a_lost_shard_is_suspect_where_the_sessions_head_says_so() -> None:
    bench = CoreBench(MIDDLE)
    bench.open()
    assert suspects(bench, HEAD, AFTER) == [Suspect(AFTER, "gone")]
    assert suspects(bench, OTHER_HEAD, AFTER) == []
    assert suspects(bench, HEAD, SHARD) == []  # it knows better about itself


# ---------------------------------------------------------------- scores of the prompt


def test_scores_are_asked_for_where_the_head_has_none_yet() -> None:
    bench = CoreBench(LAST)
    sampler = msgspec.structs.replace(sampler_of(prompt=8), prompt_logprobs=2)
    bench.open(sampler=sampler, wiring=wiring_of(LAST, forward_from=4))
    wanted = []
    for position, count in ((0, 4), (4, 3), (7, 1), (8, 1)):
        bench.step(position, count)
        wanted.append(bench.batch.items[0].scores_prompt)
        bench.done(bench.batch)
    assert wanted == [False, True, False, False]


def test_scores_travel_with_the_result() -> None:
    bench = CoreBench(LAST)
    bench.open(sampler=msgspec.structs.replace(sampler_of(prompt=8), prompt_logprobs=2))
    bench.step(0, 4, chooses=False)
    output = WorkOutput(S, 5, None, None, (), "", "")
    [effect] = bench.hear(BatchDone(bench.batch.batch, (output,), 500), b"12345")
    assert isinstance(effect.message, Result)
    assert (effect.message.token, effect.body) == (None, b"12345")
