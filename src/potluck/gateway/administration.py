"""The node's own addresses beside the API: the page, its live state and news, invites, the plan, leaving, and the chaos button.

All of them behind the API's guard. What a node can do is its own business: it implements `Administration`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount

from potluck.core.errors import AccessDenied, BadRequest
from potluck.gateway.ollama import SIGN_OF_LIFE
from potluck.gateway.page_files import ASSET_PREFIX, PageFiles
from potluck.gateway.page_state import ChaosReply, ChaosRequest, InviteReply, InviteRequest, NewsItem, PageState
from potluck.gateway.surface import sse, sse_comment
from potluck.orchestrator.tracing import TraceSummary, TraceView

_STATE_GAP_S = 0.5  # between two states on one stream
_BEAT_S = 10.0
_MAX_NEWS_WAITING = 256
_MAX_BODY_BYTES = 64 << 10

T = TypeVar("T")
Route = tuple[str, str, Callable[[Request], Awaitable[Response]]]


class LeaveRequest(msgspec.Struct, frozen=True):
    patience_s: float = 60.0


class MeasureRequest(msgspec.Struct, frozen=True):
    """`node`: a peer's whole id."""

    node: str


class Administration(Protocol):
    """What the addresses below ask of a node."""

    @property
    def allows_chaos(self) -> bool: ...
    def state(self) -> PageState: ...
    def recent_news(self) -> tuple[NewsItem, ...]: ...

    def listen(self, on_news: Callable[[NewsItem], None], on_changed: Callable[[], None]) -> Callable[[], None]:
        """Calls back until the returned function is called."""

    def invite(self, wanted: InviteRequest) -> InviteReply: ...
    async def chaos(self, wanted: ChaosRequest) -> ChaosReply: ...
    async def leave(self, patience_s: float) -> bool: ...
    def details(self) -> dict[str, Any]:
        """For `potluck status`, `doctor` and `plan`: members, plans with their reasons, processes, peers' versions."""

    def traces(self) -> tuple[TraceSummary, ...]: ...
    def trace(self, trace_id: str) -> TraceView: ...
    async def measure(self, node: str) -> Any:
        """How fast weights come from that peer; moves some megabytes."""


def add_administration(app: FastAPI, node: Administration) -> None:
    async def state(request: Request) -> Response:
        return _json(node.state())

    async def events(request: Request) -> Response:
        if request.method == "HEAD":  # which comes with GET, and has no end to wait for
            return Response(media_type="text/event-stream")
        return StreamingResponse(_events(node), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def invite(request: Request) -> Response:
        return _json(node.invite(await _body(request, InviteRequest)))

    async def chaos(request: Request) -> Response:
        if not node.allows_chaos:
            raise AccessDenied("this node was not started with --chaos")
        return _json(await node.chaos(await _body(request, ChaosRequest)))

    _add_routes(
        app,
        ("/potluck/state", "GET", state), ("/potluck/events", "GET", events), ("/potluck/invite", "POST", invite),
        ("/potluck/chaos", "POST", chaos),
    )  # fmt: skip
    _add_command_routes(app, node)
    files = PageFiles()
    app.router.routes.append(Mount(ASSET_PREFIX.rstrip("/"), app=files))

    async def page(request: Request) -> Response:
        """Browsers get the page; Ollama's clients look here for a sign of life."""
        wants_page = "text/html" in request.headers.get("accept", "")
        if not wants_page:
            return Response(SIGN_OF_LIFE, media_type="text/plain")
        answer = files.respond("GET", "/", request.headers.get("if-none-match", ""))
        return Response(answer.body, answer.status, headers=answer.headers)

    app.add_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)


def _add_command_routes(app: FastAPI, node: Administration) -> None:
    """What the page does not use: status, plan, doctor, trace, leave."""

    async def details(request: Request) -> Response:
        return _json(node.details())

    async def leave(request: Request) -> Response:
        return _json({"drained": await node.leave((await _body(request, LeaveRequest)).patience_s)})

    async def traces(request: Request) -> Response:
        return _json({"traces": node.traces()})

    async def trace(request: Request) -> Response:
        return _json(node.trace(request.path_params["trace_id"]))

    async def measure(request: Request) -> Response:
        return _json(await node.measure((await _body(request, MeasureRequest)).node))

    _add_routes(
        app,
        ("/potluck/details", "GET", details), ("/potluck/leave", "POST", leave), ("/potluck/traces", "GET", traces),
        ("/potluck/trace/{trace_id}", "GET", trace), ("/potluck/measure", "POST", measure),
    )  # fmt: skip


def _add_routes(app: FastAPI, *routes: Route) -> None:
    for path, method, handler in routes:
        app.add_route(path, handler, methods=[method], include_in_schema=False)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


async def _body(request: Request, kind: type[T]) -> T:
    data = await request.body()
    if len(data) > _MAX_BODY_BYTES:
        raise BadRequest("the body is too large")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body does not fit: {error}") from None


async def _events(node: Administration) -> AsyncIterator[bytes]:
    """News as they come, and the state when it has changed, not more often than people can see."""
    news: asyncio.Queue[NewsItem | None] = asyncio.Queue(_MAX_NEWS_WAITING)

    def on_news(item: NewsItem) -> None:
        if not news.full():
            news.put_nowait(item)

    def on_changed() -> None:
        if news.empty():
            news.put_nowait(None)

    stop = node.listen(on_news, on_changed)
    try:
        last = b""
        for item in node.recent_news():
            yield sse(item, "news")
        while True:
            told = msgspec.json.encode(msgspec.structs.replace(node.state(), now_ms=0))
            if told != last:
                last = told
                yield sse(node.state(), "state")
            try:
                item_or_nothing = await asyncio.wait_for(news.get(), _BEAT_S if not node.state().requests else 1.0)
            except TimeoutError:
                yield sse_comment("beat")
                continue
            if item_or_nothing is not None:
                yield sse(item_or_nothing, "news")
            await asyncio.sleep(_STATE_GAP_S)
    finally:
        stop()
