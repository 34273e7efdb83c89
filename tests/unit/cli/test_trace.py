"""`potluck trace`: which hop made a token slow."""

from potluck.cli.trace import hops_of, percentile, trace_lines
from potluck.orchestrator.tracing import TracedFailover, TracedStage, TracedStep, TraceSummary, TraceView

A, B = "aa" * 32, "bb" * 32
PIPELINE = (TracedStage(A, 0, 14), TracedStage(B, 15, 29))


def steps_with_slow(number: int, queue_ms: float) -> tuple[TracedStep, ...]:
    return tuple(
        TracedStep(
            n,
            0,
            n * 10.0,
            10.0 + (queue_ms if n == number else 0),
            ((4.0, 0.0), (3.0, queue_ms if n == number else 0.0)),
        )
        for n in range(1, 41)
    )


def view(**changes) -> TraceView:
    values = {
        "summary": TraceSummary("3", "m", "stop", 40, 1, 500.0, 55.0, 10.0, 35.0),
        "pipelines": (PIPELINE,),
        "failovers": (TracedFailover(20, 120.0, 7, "replay", ("b:15-29",), ("c:15-29",)),),
        "steps": steps_with_slow(17, 25.0),
    }
    return TraceView(**(values | changes))


def test_the_slow_token_is_named_with_the_hop_that_was_slow() -> None:
    lines = trace_lines(view(), {A: "anna", B: "ben"}, 3)
    assert "  token 17: 35.00 ms; ben 15-29 waiting took 25.00 ms more than usual" in lines
    assert sum(line.startswith("  token ") for line in lines) == 3


def test_failovers_come_with_their_pauses() -> None:
    text = "\n".join(trace_lines(view(), {}, 1))
    assert "failover after token 20: b:15-29 → c:15-29, pause 120 ms, 7 tokens by replay" in text
    assert "aaaaaaaa 0-14 → bbbbbbbb 15-29" in text


def test_what_no_stage_spent_is_the_wires() -> None:
    hops = hops_of(steps_with_slow(0, 0.0), ["a", "b"])
    assert [(hop.name, hop.times_ms[5]) for hop in hops] == [
        ("a computing", 4.0), ("a waiting", 0.0), ("b computing", 3.0), ("b waiting", 0.0), ("wire", 3.0),
    ]  # fmt: skip


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([], 0.5) == 0.0
