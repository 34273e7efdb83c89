"""Answers as spans: one for the answer, the slowest tokens in it, the hops in those; times that fit into each other."""

from typing import Any

import pytest

from potluck.core.errors import BadRequest
from potluck.node.spans import ENDPOINT_VARIABLE, SLOWEST_TOLD, SpanWriter, start_spans
from potluck.orchestrator.tracing import TracedStage, TracedStep, Traces, TraceSummary, TraceView

A, B = "aa" * 32, "bb" * 32


class RecordedSpan:
    def __init__(self, name: str, parent: "RecordedSpan | None", attributes: dict[str, Any], start_ns: int) -> None:
        self.name, self.parent, self.attributes, self.start_ns, self.end_ns = name, parent, attributes, start_ns, 0

    def end(self, end_time: int | None = None) -> None:
        assert end_time is not None
        self.end_ns = end_time


class RecordingTracer:
    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def start_span(
        self, name: str, context: Any = None, *, attributes: Any = None, start_time: int | None = None
    ) -> Any:
        assert start_time is not None
        self.spans.append(RecordedSpan(name, context, dict(attributes or {}), start_time))
        return self.spans[-1]


def written(count: int) -> list[RecordedSpan]:
    steps = tuple(
        TracedStep(n, 0, n * 10.0, 10.0 + n * 0.01 - 0.01, ((4.0, 1.0), (2.0, 0.0))) for n in range(1, count + 1)
    )
    summary = TraceSummary("3", "m", "stop", count, 0, count * 10.0 + 5.0, 10.0, 10.0, 12.0)
    view = TraceView(summary, ((TracedStage(A, 0, 14), TracedStage(B, 15, 29)),), (), steps)
    tracer = RecordingTracer()
    SpanWriter(tracer, lambda span: span).write(view, 1_000_000_000_000)
    return tracer.spans


def test_hops_lie_in_their_token_and_tokens_in_their_answer() -> None:
    answer, *others = written(3)
    assert (answer.name, answer.end_ns) == ("potluck.answer", 1_000_000_000_000)
    assert answer.end_ns - answer.start_ns == 35_000_000
    assert [span.name for span in others[:3]] == ["potluck.token", "potluck.hop 0-14", "potluck.hop 15-29"]
    for span in others:
        assert span.parent is not None
        assert span.parent.start_ns <= span.start_ns < span.end_ns <= span.parent.end_ns
    first, second = others[1:3]
    assert first.end_ns <= second.start_ns
    assert (first.attributes["potluck.node"], first.attributes["potluck.compute_ms"]) == (A[:16], 4.0)


def test_of_a_long_answer_only_the_slowest_tokens_are_told() -> None:
    tokens = [span.attributes["potluck.number"] for span in written(100) if span.name == "potluck.token"]
    assert tokens == list(range(101 - SLOWEST_TOLD, 101))


def test_without_a_collector_nothing_happens_and_without_the_extra_it_says_what_to_type() -> None:
    traces = Traces()
    start_spans(traces, {})()
    assert traces.on_ended is None
    try:
        import opentelemetry.sdk  # noqa: F401
    except ImportError:
        with pytest.raises(BadRequest, match=r"source folder: pip install -c constraints.txt '\.\[otel\]'"):
            start_spans(traces, {ENDPOINT_VARIABLE: "http://127.0.0.1:4318"})
