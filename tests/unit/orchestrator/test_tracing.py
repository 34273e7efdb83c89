"""What is kept of generations to say why a token was slow: bounded, stage by stage, without content."""

import pytest

from potluck.core.errors import BadRequest
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, TokenDelta
from potluck.orchestrator.request import StepTiming
from potluck.orchestrator.tracing import GENERATIONS_KEPT, STEPS_KEPT, GenerationTrace, Traces
from potluck.planner.cover import Placed
from potluck.wire.messages import Stage

A, B, C = b"A" * 32, b"B" * 32, b"C" * 32
FIRST, SECOND = Placed(A, "", Stage(0, 15, True, False)), Placed(B, "", Stage(15, 30, False, True))
SPARE = Placed(C, "", Stage(15, 30, False, True))
FAILOVER = ShardFailover(("b:15-29",), ("c:15-29",), 1, 120.0, 7, "replay")


def step(total_s: float = 0.010) -> StepTiming:
    return StepTiming(total_s, ((0.004, 0.001), (0.003, 0.0)))


def test_a_step_is_told_with_its_stages_and_the_first_token_counts_from_the_start() -> None:
    trace = GenerationTrace("7", "m", 100.0)
    trace.step(step(0.2), (FIRST, SECOND), 100.25)
    trace.step(step(), (FIRST, SECOND), 100.26)
    view = trace.view()
    assert [(s.node, s.first, s.last) for s in view.pipelines[0]] == [(A.hex(), 0, 14), (B.hex(), 15, 29)]
    assert (view.steps[1].number, view.steps[1].stages) == (2, ((4.0, 1.0), (3.0, 0.0)))
    assert (view.summary.tokens, view.summary.first_token_ms, view.summary.slowest_ms) == (2, 250.0, 10.0)


def test_a_failover_begins_another_pipeline_and_is_told_with_its_pause() -> None:
    trace = GenerationTrace("7", "m", 0.0)
    trace.step(step(), (FIRST, SECOND), 0.01)
    trace.frame(FAILOVER)
    trace.step(step(), (FIRST, SPARE), 0.02)
    trace.frame(Finished("stop", 2, 1))
    trace.end(0.5)
    view = trace.view()
    assert [each.pipeline for each in view.steps] == [0, 1]
    assert [(each.token, each.pause_ms, each.lost) for each in view.failovers] == [(1, 120.0, ("b:15-29",))]
    assert (view.summary.state, view.summary.failovers) == ("stop", 1)


@pytest.mark.parametrize(
    ("frame", "state"),
    [(PipelineAborted("pipeline_stalled", "x", 0), "pipeline_stalled"), (TokenDelta(1, 2), "cancelled")],
)
def test_an_answer_that_broke_off_says_how(frame: object, state: str) -> None:
    trace = GenerationTrace("7", "m", 0.0)
    trace.frame(frame)  # type: ignore[arg-type]
    trace.end(0.5)
    assert trace.summary().state == state


def test_only_the_newest_steps_and_generations_are_kept() -> None:
    traces = Traces()
    for number in range(GENERATIONS_KEPT + 3):
        trace = traces.begin(str(number), "m", 0.0)
    for number in range(STEPS_KEPT + 5):
        trace.step(step(), (FIRST, SECOND), number * 0.01)
    assert traces.summaries()[0].id == "3"
    steps = traces.view(trace.id).steps
    assert (len(steps), steps[0].number, steps[-1].number) == (STEPS_KEPT, 6, STEPS_KEPT + 5)
    with pytest.raises(BadRequest, match="potluck trace"):
        traces.view("0")
