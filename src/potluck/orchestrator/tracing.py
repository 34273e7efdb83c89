"""Why a token was slow: for the last generations, every token's way round, stage by stage. Bounded; no content, no clock, no I/O."""

from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from potluck.core.errors import BadRequest
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, StreamFrame
from potluck.orchestrator.request import StepTiming
from potluck.planner.cover import Placed

GENERATIONS_KEPT, STEPS_KEPT = 32, 2048
_MOST_FAILOVERS = 64
RUNNING, LEFT = "running", "cancelled"


class TracedStep(msgspec.Struct, frozen=True):
    """One token; `number` counts from 1, `at_ms` from the question. `stages`: computing and waiting at each; the rest is the wire's.

    With the ring, shards begin a token before the head has read the last one, so that nothing may be left.
    """

    number: int
    pipeline: int
    at_ms: float
    total_ms: float
    stages: tuple[tuple[float, float], ...]


class TracedStage(msgspec.Struct, frozen=True):
    """`last` is inclusive."""

    node: str
    first: int
    last: int


class TracedFailover(msgspec.Struct, frozen=True):
    """`token`: how many there were when the pipeline went on."""

    token: int
    pause_ms: float
    replayed_tokens: int
    method: str
    lost: tuple[str, ...]
    replaced_by: tuple[str, ...]


class TraceSummary(msgspec.Struct, frozen=True):
    id: str
    model: str
    state: str  # running, stop, length, cancelled, or the code it broke off with
    tokens: int
    failovers: int
    elapsed_ms: float  # to the end, or to the last token so far
    first_token_ms: float | None
    mean_ms: float
    slowest_ms: float


class TraceView(msgspec.Struct, frozen=True):
    """A step's `pipeline` is an index into `pipelines`. Of long answers only the newest steps are kept."""

    summary: TraceSummary
    pipelines: tuple[tuple[TracedStage, ...], ...]
    failovers: tuple[TracedFailover, ...]
    steps: tuple[TracedStep, ...]


class GenerationTrace:
    """Told of every step and frame of one generation, with a clock finer than the loop's.

    A step is kept as a few packed numbers, since there may be many.
    """

    def __init__(self, trace_id: str, model: str, began_s: float) -> None:
        self.id, self._model, self._began_s = trace_id, model, began_s
        self._state = RUNNING
        self._tokens = self._failover_count = 0
        self._first_token_ms: float | None = None
        self._total_ms = self._slowest_ms = self._elapsed_ms = 0.0
        self._pipelines: list[tuple[Placed, ...]] = []
        self._failovers: deque[TracedFailover] = deque(maxlen=_MOST_FAILOVERS)
        self._steps: deque[array[float]] = deque(maxlen=STEPS_KEPT)

    def __repr__(self) -> str:
        return f"<GenerationTrace {self.id} {self._state} {self._tokens} tokens>"

    def step(self, timing: StepTiming, stages: tuple[Placed, ...], now_s: float) -> None:
        self._tokens += 1
        if not self._pipelines or _have_moved(self._pipelines[-1], stages):
            self._pipelines.append(stages)
        total_ms = timing.total_s * 1000
        self._elapsed_ms = (now_s - self._began_s) * 1000
        if self._first_token_ms is None:
            self._first_token_ms = self._elapsed_ms
        else:
            self._total_ms += total_ms
            self._slowest_ms = max(self._slowest_ms, total_ms)
        times = [seconds * 1000 for stage in timing.stages for seconds in stage]
        self._steps.append(array("f", [len(self._pipelines) - 1, self._elapsed_ms, total_ms, *times]))

    def frame(self, frame: StreamFrame) -> None:
        if isinstance(frame, ShardFailover):
            self._failover_count += 1
            self._failovers.append(
                TracedFailover(
                    self._tokens, frame.pause_ms, frame.replayed_tokens, frame.method, frame.lost, frame.replaced_by
                )
            )
        elif isinstance(frame, Finished):
            self._state = frame.reason
        elif isinstance(frame, PipelineAborted):
            self._state = frame.code

    def end(self, now_s: float) -> None:
        self._elapsed_ms = (now_s - self._began_s) * 1000
        if self._state == RUNNING:
            self._state = LEFT

    def summary(self) -> TraceSummary:
        first = None if self._first_token_ms is None else round(self._first_token_ms, 3)
        mean_ms = self._total_ms / (self._tokens - 1) if self._tokens > 1 else 0.0
        return TraceSummary(
            self.id, self._model, self._state, self._tokens, self._failover_count, round(self._elapsed_ms, 3), first, round(mean_ms, 3),
            round(self._slowest_ms, 3),
        )  # fmt: skip

    def view(self) -> TraceView:
        first = self._tokens - len(self._steps) + 1
        return TraceView(
            self.summary(),
            tuple(
                tuple(TracedStage(p.node.hex(), p.stage.start, p.stage.stop - 1) for p in stages)
                for stages in self._pipelines
            ),
            tuple(self._failovers),
            tuple(_unpacked(first + index, packed) for index, packed in enumerate(self._steps)),
        )


class Traces:
    """The newest generations, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[GenerationTrace] = deque(maxlen=GENERATIONS_KEPT)
        self.on_ended: Callable[[TraceView], None] | None = None  # told of every answer that is over

    def __repr__(self) -> str:
        return f"<Traces of {len(self._kept)} generations>"

    def begin(self, trace_id: str, model: str, now_s: float) -> GenerationTrace:
        trace = GenerationTrace(trace_id, model, now_s)
        self._kept.append(trace)
        return trace

    def end(self, trace: GenerationTrace, now_s: float) -> None:
        trace.end(now_s)
        if self.on_ended is not None:
            self.on_ended(trace.view())

    def summaries(self) -> tuple[TraceSummary, ...]:
        return tuple(trace.summary() for trace in self._kept)

    def view(self, trace_id: str) -> TraceView:
        """Raises BadRequest where it is not kept."""
        for trace in self._kept:
            if trace.id == trace_id:
                return trace.view()
        raise BadRequest(f"no answer {trace_id[:16]!r} is kept; the last {GENERATIONS_KEPT} are: potluck trace")


def _have_moved(before: tuple[Placed, ...], now: tuple[Placed, ...]) -> bool:
    return before != now and [_place(each) for each in before] != [_place(each) for each in now]


def _place(placed: Placed) -> tuple[bytes, int, int]:
    return placed.node, placed.stage.start, placed.stage.stop


def _unpacked(number: int, packed: "array[float]") -> TracedStep:
    pipeline, at_ms, total_ms, *times = packed
    pairs = zip(times[::2], times[1::2], strict=True)
    return TracedStep(
        number, int(pipeline), round(at_ms, 3), round(total_ms, 3), tuple((round(compute, 3), round(queue, 3)) for compute, queue in pairs)
    )  # fmt: skip
