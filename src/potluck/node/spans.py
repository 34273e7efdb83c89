"""Answers as OpenTelemetry spans: one for the answer, one for each of its slowest tokens, one for each hop of those. No content.

Only with the `otel` extra, and where OTEL_EXPORTER_OTLP_ENDPOINT says where to send them. What is sent is what `potluck trace` shows.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from potluck.core.errors import BadRequest
from potluck.core.extras import how_to_install
from potluck.orchestrator.tracing import TracedStage, TracedStep, Traces, TraceView

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SLOWEST_TOLD = 16  # tokens of an answer; all of them would flood any collector
_NS_PER_MS = 1_000_000


class Span(Protocol):
    def end(self, end_time: int | None = None) -> None: ...


class Tracer(Protocol):
    """What of OpenTelemetry's tracer is used; times are nanoseconds of the epoch."""

    def start_span(
        self, name: str, context: Any = None, *, attributes: Mapping[str, Any] | None = None, start_time: int | None = None
    ) -> Span: ...  # fmt: skip


class SpanWriter:
    """`inside` gives the context in which a span's children begin."""

    def __init__(self, tracer: Tracer, inside: Callable[[Any], Any]) -> None:
        self._tracer, self._inside = tracer, inside

    def write(self, view: TraceView, ended_ns: int) -> None:
        summary = view.summary
        began_ns = ended_ns - round(summary.elapsed_ms * _NS_PER_MS)
        attributes = {
            "potluck.model": summary.model, "potluck.state": summary.state, "potluck.tokens": summary.tokens,
            "potluck.failovers": summary.failovers, "potluck.first_token_ms": summary.first_token_ms or 0.0,
            "potluck.mean_ms": summary.mean_ms, "potluck.slowest_ms": summary.slowest_ms,
        }  # fmt: skip
        answer = self._tracer.start_span("potluck.answer", None, attributes=attributes, start_time=began_ns)
        context = self._inside(answer)
        slowest = sorted(view.steps, key=lambda step: -step.total_ms)[:SLOWEST_TOLD]
        for step in sorted(slowest, key=lambda step: step.number):
            self._write_step(step, view.pipelines[step.pipeline], context, began_ns)
        answer.end(end_time=ended_ns)

    def _write_step(self, step: TracedStep, stages: tuple[TracedStage, ...], context: Any, began_ns: int) -> None:
        ended_ns = began_ns + round(step.at_ms * _NS_PER_MS)
        at_ms = step.at_ms - step.total_ms
        span = self._tracer.start_span(
            "potluck.token", context, attributes={"potluck.number": step.number}, start_time=_at(began_ns, at_ms)
        )
        inner = self._inside(span)
        # Nobody's clock but the head's is asked: hops stand in their order, with the wire's time spread evenly before each.
        wire_ms = max(0.0, step.total_ms - sum(map(sum, step.stages))) / max(1, len(step.stages))
        for stage, (compute_ms, queue_ms) in zip(stages, step.stages, strict=False):
            at_ms += wire_ms
            hop = self._tracer.start_span(
                f"potluck.hop {stage.first}-{stage.last}", inner, start_time=_at(began_ns, at_ms),
                attributes={
                    "potluck.node": stage.node[:16], "potluck.compute_ms": compute_ms, "potluck.queue_ms": queue_ms,
                    "potluck.wire_ms": wire_ms,
                },
            )  # fmt: skip
            at_ms += compute_ms + queue_ms
            hop.end(end_time=_at(began_ns, at_ms))
        span.end(end_time=ended_ns)


def _at(began_ns: int, ms: float) -> int:
    return began_ns + round(ms * _NS_PER_MS)


def start_spans(traces: Traces, environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Sends every answer that ends from now on, where a collector is named; what is returned ends that.

    Raises BadRequest where one is named and the extra is not installed.
    """
    if not environment.get(ENDPOINT_VARIABLE):
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_span_in_context
    except ImportError:
        raise BadRequest(
            f"{ENDPOINT_VARIABLE} is set, and OpenTelemetry is not installed; {how_to_install('otel')}"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "potluck"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=2)))
    writer = SpanWriter(provider.get_tracer("potluck"), set_span_in_context)
    traces.on_ended = lambda view: writer.write(view, time.time_ns())

    def stop() -> None:
        traces.on_ended = None
        provider.shutdown()

    return stop
