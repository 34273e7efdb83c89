"""What the sampling shard remembers of an answer when its head is lost, and of which answers it remembers nothing."""

import pytest

from potluck.core.remembered import AnswerSoFar
from potluck.shard.core import Remember
from potluck.wire.messages import Close, Rewire, Sampler, Stage, Truncate
from tests.support.shard_cores import (
    BEFORE,
    FIRST,
    HEAD,
    LAST,
    OTHER_HEAD,
    WHOLE,
    CoreBench,
    sampler_of,
    session_id,
    wiring_of,
)

KEY = b"k" * 32


def begun(stage: Stage = LAST, key: bytes = KEY) -> CoreBench:
    """A prompt of four tokens (0 … 3) is through, and two were chosen after it."""
    bench = CoreBench(stage)
    bench.open(resume_key=key)
    bench.step(0, 4)
    bench.done(bench.batch, token=50)
    bench.step(4)
    bench.done(bench.batch, token=51)
    return bench


def remembered(bench: CoreBench, lost: bytes = HEAD) -> list[Remember]:
    bench.core.on_node_lost(lost, 1.0)
    return [effect for effect in bench.core.take_effects() if isinstance(effect, Remember)]


@pytest.mark.parametrize("stage", [LAST, WHOLE])
def test_when_the_head_is_lost_the_tokens_are_remembered(stage: Stage) -> None:
    assert remembered(begun(stage)) == [Remember(KEY, AnswerSoFar(4, (0, 1, 2, 3, 50, 51)))]


def test_while_the_head_is_thought_to_live_they_can_be_had_too() -> None:
    bench = begun()
    assert bench.core.recall(KEY) == AnswerSoFar(4, (0, 1, 2, 3, 50, 51))
    assert bench.core.recall(b"x" * 32) is None


def test_nothing_is_remembered_of_who_did_not_ask_for_it() -> None:
    bench = begun(key=b"")
    assert bench.core.recall(b"") is None
    assert remembered(bench) == []


def test_a_shard_that_does_not_sample_remembers_nothing() -> None:
    bench = CoreBench(FIRST)
    bench.open(resume_key=KEY)
    assert remembered(bench) == []


def test_a_session_that_its_head_closed_is_not_remembered() -> None:
    bench = begun()
    bench.tell(HEAD, Close(session_id(1)))
    assert bench.core.recall(KEY) is None
    assert remembered(bench) == []


@pytest.mark.parametrize("lost", [BEFORE, OTHER_HEAD])
def test_a_neighbour_that_is_lost_is_no_reason(lost: bytes) -> None:
    assert remembered(begun(), lost) == []


def test_after_a_new_epoch_its_journal_counts() -> None:
    bench = begun()
    sampler = Sampler(sampler_of().params, 0, 4, (0, 1, 2, 3, 50), (99,), 20)
    bench.tell(HEAD, Rewire(session_id(1), 1, 4, wiring_of(LAST), sampler))
    assert bench.core.recall(KEY) == AnswerSoFar(4, (0, 1, 2, 3, 50))
    bench.step(4, epoch=1)
    bench.done(bench.batch, token=52)
    assert remembered(bench) == [Remember(KEY, AnswerSoFar(4, (0, 1, 2, 3, 50, 52)))]


def test_a_token_that_is_chosen_again_is_there_once() -> None:
    bench = begun()
    bench.tell(HEAD, Truncate(session_id(1), 0, 4))
    bench.step(4)
    bench.done(bench.batch, token=51)
    assert bench.core.recall(KEY) == AnswerSoFar(4, (0, 1, 2, 3, 50, 51))
