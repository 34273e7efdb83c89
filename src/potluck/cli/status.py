"""`potluck status`: what the running node knows of its swarm: layers, gaps, load, memory, processes. With --via: what given nodes serve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.console import (
    EXIT_FAILURE,
    JsonOption,
    counted,
    fitting_columns,
    format_table,
    one_line,
    print_json,
    shown_bytes,
    terminal_width,
)
from potluck.cli.layer_strip import LEGEND, layer_strip
from potluck.cli.local import status_via
from potluck.cli.running import RESTART, call, read_state

if TYPE_CHECKING:
    from potluck.gateway.page_state import NodeView, PageState, RequestView, ShardView


def status(
    via: Annotated[str | None, typer.Option("--via", help="ADDR,ADDR,…: ask these nodes instead.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who holds which layers, what is missing and what would fix it; ends with 1 where a model cannot answer."""
    if via is not None:
        return status_via(via, as_json)
    details = call("GET", "/potluck/details")
    state = read_state(details["state"])
    if as_json:
        print_json(details)
    else:
        print("\n".join(status_lines(state, details, terminal_width())))
    if not state.models or not all(model.can_answer for model in state.models):
        raise typer.Exit(EXIT_FAILURE)
    return None


def status_lines(state: "PageState", details: dict[str, Any], width: int | None = None) -> list[str]:
    """`width`: of the terminal, where there is one; what matters least is left out where not all of it fits."""
    swarm, own = state.swarm, details["processes"]
    named = f" ({one_line(swarm.name)})" if swarm.name else ""
    lines = [
        f"swarm {swarm.id[:8]}{named}, {counted(len(details['members']), 'member')}, this node {swarm.self_id[:8]} at {details['listen']}",
        f"API {state.api.base_url}{' (asks for a key)' if state.api.needs_key else ''}, page {state.api.base_url.removesuffix('/v1')}/",
    ]
    if details.get("expulsion"):
        lines += ["", one_line(details["expulsion"])]
    for model in state.models:
        lines += ["", one_line(model.verdict), *([f"next: {one_line(model.fix)}"] if model.fix else [])]
        lines += layer_strip(state, model)
    lines += [LEGEND] if state.models else ["", f"This swarm serves no model yet; type: {RESTART} --model NAME"]
    lines += ["", _node_table(state.nodes, width)]
    if state.requests:
        lines += ["", *(request_line(request, state) for request in state.requests)]
    return [*lines, "", *_process_lines(own)]


_COLUMNS = (
    "NODE",
    "NAME",
    "STATE",
    "TRUST",
    "LAYERS",
    "SESSIONS",
    "QUEUE",
    "MS/TOKEN",
    "RTT",
    "WEIGHTS",
    "FREE",
    "ADDRESS",
)
_NUMBERS = (5, 6, 7, 8, 9, 10)


_LEAST_FIRST = (11, 9, 6, 3, 10, 5, 8, 7)  # address, weights, queue, trust, free, sessions, round trip, milliseconds


def _node_table(nodes: "Sequence[NodeView]", width: int | None) -> str:
    rows = [_node_row(node) for node in nodes]
    kept = list(range(len(_COLUMNS))) if width is None else fitting_columns([_COLUMNS, *rows], width, _LEAST_FIRST)
    shown = [[line[column] for column in kept] for line in (_COLUMNS, *rows)]
    return format_table(shown[0], shown[1:], right=[kept.index(column) for column in _NUMBERS if column in kept])


def _node_row(node: "NodeView") -> tuple[str, ...]:
    working = [shard for shard in node.shards if shard.max_sessions]
    return (
        node.id[:8], one_line(node.name) + (" (this)" if node.is_self else ""), node.state, node.trust,
        ", ".join(_held(shard) for shard in node.shards) or "none",
        f"{sum(shard.sessions for shard in working)}/{sum(shard.max_sessions for shard in working)}",
        str(sum(shard.queue_depth for shard in working)), f"{sum(shard.step_ms for shard in node.shards):.1f}",
        "" if node.rtt_ms is None else f"{node.rtt_ms:.1f} ms", shown_bytes(node.memory.model_bytes),
        shown_bytes(node.memory.free_bytes), one_line(node.address),
    )  # fmt: skip


def _held(shard: "ShardView") -> str:
    return f"{shard.first}-{shard.last}" + ("" if shard.state == "serving" else f" ({shard.state})")


def request_line(request: "RequestView", state: "PageState") -> str:
    names = {node.id: one_line(node.name) or node.id[:8] for node in state.nodes}
    way = " → ".join(
        f"{names.get(stage.node, stage.node[:8])} {stage.first}-{stage.last} "
        f"({stage.compute_ms:.1f}+{stage.queue_ms:.1f}+{stage.wire_ms:.1f} ms)"
        for stage in request.stages
    )
    return (
        f"answer {request.id}: {request.phase}, {request.tokens} tokens, {request.tokens_per_s:.1f}/s, "
        f"{request.failovers} failovers, {way}"
    )


def _limit(worker: dict[str, Any]) -> str:
    """What is worth knowing after it ran out of memory: its conversations are fewer or shorter than planned."""
    times = worker.get("out_of_memory", 0)
    if not times:
        return ""
    return f", ran out of memory {times}×: KV limit lowered to {shown_bytes(worker['kv_limit_bytes'])}"


def _process_lines(own: dict[str, Any]) -> list[str]:
    lines = [f"daemon {own['daemon_pid']}, {shown_bytes(own['memory_bytes'])}, Potluck {own['version']}"]
    for worker in own["workers"]:
        lines.append(
            f"worker {worker['pid']}, {shown_bytes(worker['memory_bytes'])}, {worker['shard']}{_limit(worker)}"
        )
    return lines
