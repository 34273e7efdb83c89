"""`potluck trace`: why was this token slow? Each answer's tokens hop by hop, from what the running node has kept of the last ones."""

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from potluck.cli.console import JsonOption, format_table, print_json
from potluck.cli.running import call, converted
from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.orchestrator.tracing import TracedStep, TraceSummary, TraceView

_SLOWEST_SHOWN = 5


def trace(
    session: Annotated[
        str | None, typer.Argument(metavar="ANSWER", help="Its name in the list; last: the newest.")
    ] = None,
    slowest: Annotated[int, typer.Option("--slowest", min=0, max=100, help="How many slow tokens.")] = _SLOWEST_SHOWN,
    as_json: JsonOption = False,
) -> None:
    """Show where an answer's time went, hop by hop; without a name: list the answers that are kept."""
    from potluck.orchestrator.tracing import TraceSummary, TraceView

    told = call("GET", "/potluck/traces")
    if session is None:
        return print_json(told) if as_json else _print_list(converted(told["traces"], tuple[TraceSummary, ...]))
    if session == "last":
        if not told["traces"]:
            raise BadRequest('no answer has been written here yet; try: potluck chat, or potluck ask "..."')
        session = str(told["traces"][-1]["id"])
    if not session.replace("-", "").replace("_", "").isalnum() or not session.isascii():
        raise BadRequest("that is no answer's name; `potluck trace` lists them")
    found = call("GET", f"/potluck/trace/{session}")
    if as_json:
        return print_json(found)
    print("\n".join(trace_lines(converted(found, TraceView), _names(), slowest)))
    return None


def _print_list(summaries: "Sequence[TraceSummary]") -> None:
    if not summaries:
        return print("No answer has been written here yet; try: potluck chat")
    rows = [
        (
            each.id, each.model, _shown_state(each), str(each.tokens), "" if each.first_token_ms is None else f"{each.first_token_ms:.0f}",
            f"{each.mean_ms:.1f}", f"{each.slowest_ms:.1f}", str(each.failovers),
        )
        for each in summaries
    ]  # fmt: skip
    header = ("ANSWER", "MODEL", "STATE", "TOKENS", "FIRST MS", "MEAN MS", "SLOWEST MS", "FAILOVERS")
    print(format_table(header, rows, right=(3, 4, 5, 6, 7)))
    return print("more: potluck trace ANSWER")


def _shown_state(summary: "TraceSummary") -> str:
    return {"stop": "complete", "length": "at its limit"}.get(summary.state, summary.state)


class Hop(NamedTuple):
    """A part of every token's way: computing or waiting at a stage, or the wire in all."""

    name: str
    times_ms: tuple[float, ...]


def trace_lines(view: "TraceView", names: dict[str, str], slowest: int) -> list[str]:
    summary = view.summary
    first = "" if summary.first_token_ms is None else f", first token after {summary.first_token_ms:.0f} ms"
    lines = [f"answer {summary.id} of {summary.model}: {_shown_state(summary)}, {summary.tokens} tokens{first}"]
    for index, stages in enumerate(view.pipelines):
        steps = [step for step in view.steps if step.pipeline == index and step.number > 1]
        labels = [f"{names.get(stage.node) or stage.node[:8]} {stage.first}-{stage.last}" for stage in stages]
        lines += ["", f"pipeline {' → '.join(labels)}: {len(steps)} tokens"]
        hops = hops_of(steps, labels)
        if steps:
            lines += [_hop_table(steps, hops)]
        if steps and slowest:
            lines += ["slowest tokens:", *_slow_lines(steps, hops, slowest)]
    for failover in view.failovers:
        lines += [
            "",
            f"failover after token {failover.token}: {', '.join(failover.lost)} → {', '.join(failover.replaced_by)}, "
            f"pause {failover.pause_ms:.0f} ms, {failover.replayed_tokens} tokens by {failover.method}",
        ]
    return lines


def hops_of(steps: "Sequence[TracedStep]", labels: list[str]) -> list[Hop]:
    """The parts of these tokens' times, in the order of the way; a step that tells less counts as nothing there."""
    hops = []
    for index, label in enumerate(labels):
        for part, what in enumerate(("computing", "waiting")):
            times = tuple(step.stages[index][part] if index < len(step.stages) else 0.0 for step in steps)
            hops.append(Hop(f"{label} {what}", times))
    wire = tuple(max(0.0, step.total_ms - sum(map(sum, step.stages))) for step in steps)
    return [*hops, Hop("wire", wire)]


def _hop_table(steps: "Sequence[TracedStep]", hops: list[Hop]) -> str:
    everything = [Hop("all", tuple(step.total_ms for step in steps)), *hops]
    rows = [
        (hop.name, *(f"{percentile(hop.times_ms, share):.2f}" for share in (0.5, 0.95, 0.99, 1.0)))
        for hop in everything
    ]
    return format_table(("HOP", "P50 MS", "P95", "P99", "MAX"), rows, right=(1, 2, 3, 4))


def _slow_lines(steps: "Sequence[TracedStep]", hops: list[Hop], count: int) -> list[str]:
    slowest = sorted(range(len(steps)), key=lambda index: -steps[index].total_ms)[:count]
    usual = [percentile(hop.times_ms, 0.5) for hop in hops]
    lines = []
    for index in slowest:
        excess, hop = max((hop.times_ms[index] - usual[at], hop.name) for at, hop in enumerate(hops))
        step = steps[index]
        why = f"{hop} took {excess:.2f} ms more than usual" if excess > 0 else "nothing stands out"
        lines.append(f"  token {step.number}: {step.total_ms:.2f} ms; {why}")
    return lines


def percentile(values: "Sequence[float]", share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0


def _names() -> dict[str, str]:
    return {node["id"]: node["name"] for node in call("GET", "/potluck/state")["nodes"]}
