"""Scores of a prompt and grammars, in a generation driven by hand."""

import pytest

from potluck.core.grammar import Grammar
from potluck.orchestrator.frames import Finished, PipelineAborted, PromptLogprobs, ShardStatus, TokenDelta
from potluck.orchestrator.generation import Generation
from potluck.wire.messages import Result, Step
from potluck.wire.prompt_scores import TokenScore, encode_scores
from tests.support.generations import HeadBench, node

# ---------------------------------------------------------------- scores of the prompt


def scored(prompt: int, first: int, stop: int, top: int = 1) -> bytes:
    """What the chunk up to `stop` brings, after one up to `first`."""
    count = min(stop, prompt - 1) - min(first, prompt - 1)
    return encode_scores([TokenScore(-float(first + place), True, ((7, -1.0),)) for place in range(count)], top)


def score_bench(max_tokens: int = 20) -> HeadBench:
    return HeadBench(prompt=6, max_tokens=max_tokens, asked={"prompt_logprobs": 1})


def chunk(bench: HeadBench, stop: int, body: bytes, token: int | None = None) -> None:
    message = Result(bench.generation.sessions[-1], bench.generation.epoch, stop, token)
    bench.generation.on_message(bench.generation.stages[-1].node, message, bench.now_s, body)
    bench._take()


def test_scores_of_the_prompt_come_once_and_before_the_first_token() -> None:
    bench = score_bench()
    bench.run()
    chunk(bench, 2, scored(6, 0, 2))
    chunk(bench, 2, scored(6, 0, 2))  # doubled on the way
    chunk(bench, 4, scored(6, 2, 4))
    assert bench.frames == []
    chunk(bench, 6, scored(6, 4, 6), token=100)
    scores, delta = bench.frames
    assert isinstance(scores, PromptLogprobs)
    assert [(each.token, each.logprob) for each in scores.positions] == [(1, 0), (2, -1), (3, -2), (4, -3), (5, -4)]
    assert isinstance(delta, TokenDelta)


def test_a_failover_in_the_prompt_leaves_no_gap_and_no_double_in_its_scores() -> None:
    bench = score_bench()
    bench.run()
    chunk(bench, 2, scored(6, 0, 2))
    bench.lose(3)
    bench.answer_all()
    chunk(bench, 4, scored(6, 2, 4))
    chunk(bench, 6, scored(6, 4, 6), token=100)
    [scores] = bench.kinds(PromptLogprobs)
    assert [each.logprob for each in scores.positions] == [0, -1, -2, -3, -4]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body", [b"", b"rubbish", scored(6, 0, 1), scored(6, 0, 3), scored(6, 0, 2)[:-8] + b"\xff" * 8]
)
def test_scores_that_are_not_those_due_are_a_corruption(body: bytes) -> None:
    bench = score_bench()
    bench.run()
    chunk(bench, 2, body)
    [status] = bench.kinds(ShardStatus)
    assert (status.code, status.node) == ("shard_corruption", node(3).hex())  # type: ignore[union-attr]


def test_scores_that_nobody_asked_for_are_a_corruption() -> None:
    bench = HeadBench()
    bench.run()
    chunk(bench, 2, b"something")
    [status] = bench.kinds(ShardStatus)
    assert status.code == "shard_corruption"  # type: ignore[union-attr]


def test_without_tokens_to_choose_the_end_is_the_prompts() -> None:
    bench = score_bench(max_tokens=0)
    bench.run()
    steps = [message for _, message in bench.of(Step)]
    assert [step.chooses for step in steps] == [False, False]  # type: ignore[union-attr]
    for stop in (2, 4, 6):
        chunk(bench, stop, scored(6, stop - 2, stop))
    assert [type(frame) for frame in bench.frames] == [PromptLogprobs, Finished]
    assert bench.frames[-1] == Finished("length", 0, 0)
    assert bench.closed == [1, 2, 3]


def test_scores_say_as_truly_as_answers_how_exact_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generation, "exactness", "tolerance")
    bench = score_bench(max_tokens=0)
    bench.run()
    for stop in (2, 4, 6):
        chunk(bench, stop, scored(6, stop - 2, stop))
    assert bench.frames[-1] == Finished("length", 0, 0, "tolerance")


# ---------------------------------------------------------------- a grammar that cannot be


def test_a_bad_grammar_ends_the_generation_and_nobody_is_lost() -> None:
    bench = HeadBench(asked={"grammar": Grammar("regex", "(")})
    bench.start()
    bench.refuse(2, "bad_grammar")
    assert bench.frames == [PipelineAborted("bad_grammar", "words", 0)]
    assert bench.closed == [1, 2, 3]


def test_only_the_shard_that_chooses_may_judge_a_grammar() -> None:
    bench = HeadBench(asked={"grammar": Grammar("regex", "(")})
    bench.start()
    bench.refuse(0, "bad_grammar")
    assert not bench.generation.is_ended
