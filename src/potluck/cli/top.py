"""`potluck top`: the swarm live at the terminal, from the running node's events."""

import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.console import JsonOption, one_line, print_json, shown_bytes
from potluck.cli.layer_strip import LEGEND, layer_strip
from potluck.cli.running import call, converted, events, read_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from potluck.gateway.page_state import NewsItem, PageState

_NEWS_SHOWN = 8
_WIDE, _PAPER_WIDTH = 100, 140
_WIDE_COLUMNS = ("QUEUE", "WEIGHTS", "FREE")
_STYLES = {"#": "green", "+": "cyan", "~": "yellow", "-": "magenta", "!": "bold red"}


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch nodes, layers, running answers and news live; Ctrl-C ends it. Not on a terminal: one frame."""
    if as_json:
        return print_json(call("GET", "/potluck/state"))
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PAPER_WIDTH)
    if once or not console.is_terminal or console.is_dumb_terminal:
        return console.print(frame(read_state(call("GET", "/potluck/state")), (), console.width))
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            for state, news in updates(events("/potluck/events")):
                live.update(frame(state, news, console.width), refresh=True)
        except KeyboardInterrupt:
            return None
    return None


def updates(told: "Iterable[tuple[str, Any]]") -> "Iterator[tuple[PageState, tuple[NewsItem, ...]]]":
    """What is to be shown after each event, from the first state on; the newest news last."""
    from potluck.gateway.page_state import NewsItem

    state: PageState | None = None
    news: deque[NewsItem] = deque(maxlen=_NEWS_SHOWN)
    for name, data in told:
        if name == "state":
            state = read_state(data)
        elif name == "news":
            news.append(converted(data, NewsItem))
        if state is not None:
            yield state, tuple(news)


def frame(state: "PageState", news: "tuple[NewsItem, ...]", width: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    swarm = state.swarm
    parts: list[RenderableType] = [
        Text(f"swarm {swarm.id[:8]} {one_line(swarm.name)}  API {state.api.base_url}".rstrip(), style="bold")
    ]
    for model in state.models:
        parts += [Text(one_line(model.verdict), style="green" if model.can_answer else "bold red")]
        parts += [Text(one_line(model.fix))] if model.fix else []
        parts += [_coloured(line) for line in layer_strip(state, model)]
    parts += [Text(LEGEND, style="dim"), Text(), _node_table(state, width >= _WIDE), Text(), _request_table(state)]
    return Group(*parts, Text(), *(_news_line(item) for item in news))


def _coloured(line: str) -> "RenderableType":
    from rich.text import Text

    label, _, row = line.partition("  ")
    text = Text(label + "  ")
    for mark in row:
        text.append(mark, style=_STYLES.get(mark, ""))
    return text


def _node_table(state: "PageState", is_wide: bool) -> "Table":
    table = _table(
        "NODE", "NAME", "STATE", "LAYERS", "SESSIONS", "MS/TOKEN", "RTT", *(_WIDE_COLUMNS if is_wide else ())
    )
    for node in state.nodes:
        cells = [
            node.id[:8], one_line(node.name), node.state, ", ".join(f"{s.first}-{s.last}" for s in node.shards) or "none",
            str(sum(s.sessions for s in node.shards)), f"{sum(s.step_ms for s in node.shards):.1f}",
            "" if node.rtt_ms is None else f"{node.rtt_ms:.1f} ms",
        ]  # fmt: skip
        if is_wide:
            queued = sum(s.queue_depth for s in node.shards)
            cells += [str(queued), shown_bytes(node.memory.model_bytes), shown_bytes(node.memory.free_bytes)]
        table.add_row(*cells, style="dim" if node.state == "lost" else "")
    return table


def _request_table(state: "PageState") -> "RenderableType":
    from rich.text import Text

    if not state.requests:
        return Text("no answer is being written", style="dim")
    names = {node.id: one_line(node.name) or node.id[:8] for node in state.nodes}
    table = _table("ANSWER", "PHASE", "TOKENS", "TOKENS/S", "FAILOVERS", "STAGE: COMPUTE + QUEUE + WIRE, MS")
    for request in state.requests:
        stages = [
            f"{names.get(stage.node, stage.node[:8])} {stage.first}-{stage.last}: "
            f"{stage.compute_ms:.1f} + {stage.queue_ms:.1f} + {stage.wire_ms:.1f}"
            for stage in request.stages
        ]
        table.add_row(
            one_line(request.id), request.phase, str(request.tokens), f"{request.tokens_per_s:.1f}", str(request.failovers),
            "\n".join(stages),
        )  # fmt: skip
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for column in table.columns:
        column.no_wrap = True
    return table


def _news_line(item: "NewsItem") -> "RenderableType":
    import time

    from rich.text import Text

    shown = time.strftime("%H:%M:%S", time.localtime(item.at_ms / 1000))
    return Text(f"{shown} {one_line(item.text)}", style="red" if item.kind in ("lost", "failover") else "")
