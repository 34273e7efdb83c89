"""How much may be under way: windows of a prompt, the ring's credit, and a reader that does not read."""

import msgspec
import pytest

from potluck.orchestrator.flow import Chunk, Flow
from potluck.orchestrator.request import GenerationSettings
from potluck.shard.passing_on import _REPLAY_STEPS
from potluck.shard.settings import ShardSettings


def flow_of(*, uses_ring: bool = True, wants_tokens: bool = True, longest_chunk: int | None = None) -> Flow:
    settings = GenerationSettings(prefill_chunk=4, prefill_window=2, uses_ring=uses_ring, ring_credits=4)
    return Flow(settings, wants_tokens=wants_tokens, longest_chunk=longest_chunk)


def test_a_prompt_goes_out_a_window_at_a_time_and_its_end_asks_for_a_token() -> None:
    flow = flow_of()
    flow.restart(0)
    assert flow.take_due(10) == [Chunk(0, 4, False), Chunk(4, 8, False)]
    assert flow.take_due(10) == []
    flow.arrived(4)
    assert flow.take_due(10) == [Chunk(8, 10, True)]
    assert flow.is_ring_running
    flow.arrived(10)
    assert flow.take_due(11) == []  # the ring feeds itself


@pytest.mark.parametrize("window", [None, 64])
def test_never_more_is_under_way_than_a_shards_queue_takes_beside_a_replay(window: int | None) -> None:
    flow = Flow(GenerationSettings(prefill_chunk=4, prefill_window=window))
    flow.restart(0, stages=64)
    queue = next(field.default for field in msgspec.structs.fields(ShardSettings) if field.name == "max_waiting")
    assert len(flow.take_due(10_000)) + _REPLAY_STEPS <= queue


def test_without_a_ring_every_token_is_sent_until_too_many_are_unread() -> None:
    flow = flow_of(uses_ring=False)
    assert flow.restart(9) == 0
    assert flow.take_due(10) == [Chunk(9, 10, True)]
    flow.arrived(10)
    flow.unread = 4
    assert flow.is_reader_slow()
    assert flow.take_due(11) == []
    assert flow.read(1, is_running=True) == 0
    assert flow.take_due(11) == [Chunk(10, 11, True)]


def test_a_prompt_that_is_only_scored_asks_for_no_token_and_keeps_to_the_longest_chunk() -> None:
    flow = flow_of(wants_tokens=False, longest_chunk=3)
    assert flow.take_due(5) == [Chunk(0, 3, False), Chunk(3, 5, False)]


@pytest.mark.parametrize(
    ("length", "stages", "count"),
    [(1024, 2, 48), (256, 2, 32), (60, 2, 16), (1024, 1, 128), (1024, 8, 16), (9000, 2, 128)],
)
def test_a_prompt_is_cut_so_that_no_stage_waits_long_for_the_first_piece(length: int, stages: int, count: int) -> None:
    flow = Flow(GenerationSettings())
    flow.restart(0, stages, cuts_short=True)
    chunks = flow.take_due(length)
    assert chunks[0].stop == min(count, length)
    assert len(chunks) == min(stages + 2, -(-length // count))  # one for each stage, and some on their way
    flow.arrived(chunks[0].stop)
    assert all(chunk.stop - chunk.start == count for chunk in flow.take_due(length) if chunk.stop < length)


def test_stages_that_gain_nothing_by_short_chunks_get_long_ones_and_as_many() -> None:
    flow = Flow(GenerationSettings())
    flow.restart(0, 4)
    assert flow.take_due(1024) == [Chunk(start, start + 128, False) for start in range(0, 6 * 128, 128)]


def test_what_is_cut_is_what_is_still_to_be_sent_and_no_longer_than_allowed() -> None:
    flow = Flow(GenerationSettings())
    flow.restart(964, 2, cuts_short=True)
    assert flow.take_due(1024)[0] == Chunk(964, 980, False)
    flow = Flow(GenerationSettings(prefill_chunk=8, prefill_window=2))
    flow.restart(0, 2, cuts_short=True)
    assert flow.take_due(1024) == [Chunk(0, 8, False), Chunk(8, 16, False)]


def test_credit_comes_in_halves_and_not_while_a_pipeline_is_formed() -> None:
    flow = flow_of()
    assert flow.restart(0) == 4
    flow.unread = 4
    assert flow.is_reader_slow()
    assert flow.read(1, is_running=True) == 0
    assert flow.is_reader_slow()  # read, and not yet told to the ring
    assert flow.read(1, is_running=True) == 2
    assert not flow.is_reader_slow()
    assert flow.read(2, is_running=False) == 0
    assert flow.restart(7) == 4  # anew, less what is unread


def test_a_new_epoch_gives_at_least_one_credit_and_starts_where_all_stages_are() -> None:
    flow = flow_of()
    flow.take_due(4)
    flow.unread = 9
    flow.stop()
    assert flow.restart(2) == 1
    assert flow.take_due(4) == [Chunk(2, 4, True)]
