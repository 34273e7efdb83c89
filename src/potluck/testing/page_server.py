"""A node's page and the part of its API that the page uses, over a scripted swarm: real HTTP, invented answers.

For tests of the page in a browser, and for looking at it: `python -m potluck.testing.page_server`. Runs no model.
"""

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import uvicorn

from potluck.core.errors import BadRequest, PotluckError
from potluck.gateway.page_files import PageFiles, Receive, Scope, Send
from potluck.gateway.page_state import ChaosReply, ChaosRequest, InviteReply, InviteRequest, NewsItem, RequestView
from potluck.testing.scripted_swarm import LARGE, SMALL, ScriptedSwarm

_T = TypeVar("_T")
_MAX_BODY_BYTES = 1 << 20
_QUEUE_LENGTH = 256
_PATIENCE_S = 10.0
_PAUSE_MS = 184.0
_TOKENS_PER_S = 36.4

ANSWER = """A **potluck** is a meal to which every guest brings a dish.

## Why people like it

1. Nobody has to cook for everyone.
2. There is more *variety* than one kitchen makes.
3. It works with `n` guests, as long as somebody brings plates.

| dish | who | serves |
| --- | :---: | ---: |
| lentil soup | Anna | 8 |
| flat bread | Ben | 12 |

```python
def dinner(guests):
    return sorted(guest.dish for guest in guests)
```

This swarm does the same with the layers of a model: everybody brings some, and the answer comes from all of them.
"""


class Script(msgspec.Struct):
    """What the next answers are like. `hold_after`: how many pieces are sent before the answer waits for `release`."""

    answer: str = ANSWER
    pace_s: float = 0.001
    hold_after: int | None = None
    differs_when_repeated: bool = False
    api_key: str | None = None
    error: str = ""


class PageServer:
    """Serves from a thread of its own while it is entered. Tests change the swarm and the script through `do`."""

    def __init__(self, swarm: ScriptedSwarm | None = None, script: Script | None = None, port: int = 0) -> None:
        self.swarm = swarm or ScriptedSwarm()
        self.script = script or Script()
        self.bodies: list[dict[str, Any]] = []  # of the questions that were asked
        self.disconnects = 0
        self._files = PageFiles()
        self._subscribers: set[asyncio.Queue[bytes]] = set()
        self._killed: dict[str, str] = {}  # request id → node
        self._released, self._closing = asyncio.Event(), asyncio.Event()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        config = uvicorn.Config(
            self._app, log_level="error", timeout_graceful_shutdown=1, lifespan="off", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="page-server")

    def __enter__(self) -> "PageServer":
        self._thread.start()
        if not self._started.wait(_PATIENCE_S):
            raise PotluckError("the page's test server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._closing.set)
        self._server.should_exit = True
        self._thread.join(_PATIENCE_S)

    def do(self, change: Callable[[ScriptedSwarm], _T]) -> _T:
        """Runs `change` where the server runs, then tells every open page."""

        async def changed() -> _T:
            known = len(self.swarm.news)
            result = change(self.swarm)
            self._publish(self.swarm.news[known:])
            return result

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(changed(), self._loop).result(_PATIENCE_S)

    def release(self) -> None:
        """Lets the answer that is held go on."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._released.set)

    # ------------------------------------------------------------ serving

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._server.serve([self._socket])

        asyncio.run(serve())

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/" or path.startswith("/page/"):
            await self._files(scope, receive, send)
        elif not self._is_allowed(scope):
            await _send_error(send, 401, "invalid_api_key", "This node wants its API key.")
        else:
            await self._route(path, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        key = self.script.api_key
        return key is None or (b"authorization", f"Bearer {key}".encode()) in scope["headers"]

    async def _route(self, path: str, receive: Receive, send: Send) -> None:
        try:
            if path == "/potluck/state":
                await _send_json(send, 200, self._state())
            elif path == "/v1/models":
                await _send_json(
                    send, 200, {"object": "list", "data": [{"id": name, "object": "model"} for name in (SMALL, LARGE)]}
                )
            elif path == "/potluck/invite":
                msgspec.json.decode(await _read_body(receive), type=InviteRequest)
                await _send_json(send, 200, InviteReply("potluck-7f3k9q", "potluck join potluck-7f3k9q"))
            elif path == "/potluck/chaos":
                await _send_json(
                    send, 200, self._kill(msgspec.json.decode(await _read_body(receive), type=ChaosRequest))
                )
            elif path == "/potluck/events":
                await self._stream(receive, send, self._events())
            elif path == "/v1/chat/completions":
                await self._complete(await _read_body(receive), receive, send)
            else:
                await _send_error(send, 404, "not_found", "there is no such route")
        except (msgspec.DecodeError, BadRequest) as error:
            await _send_error(send, 400, "bad_request", str(error))

    async def _stream(self, receive: Receive, send: Send, events: AsyncIterator[bytes]) -> None:
        """Sends events until they end or the reader goes away."""

        async def write() -> None:
            await _start(send, 200, b"text/event-stream")
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        writing = asyncio.create_task(write())
        leaving = asyncio.create_task(_until_disconnected(receive))
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({writing, leaving, closing}, return_when=asyncio.FIRST_COMPLETED)
        self.disconnects += leaving.done()
        for task in (writing, leaving, closing):
            task.cancel()
        await asyncio.gather(writing, leaving, closing, return_exceptions=True)
        if self._closing.is_set():
            await send({"type": "http.response.body", "body": b""})

    # ------------------------------------------------------------ the swarm

    def _state(self) -> bytes:
        return msgspec.json.encode(self.swarm.state(self.base_url, self.script.api_key is not None))

    def _publish(self, news: list[NewsItem]) -> None:
        events = [_event(self._state(), "state"), *(_event(msgspec.json.encode(item), "news") for item in news)]
        for queue in self._subscribers:
            for event in events:
                queue.put_nowait(event)

    async def _events(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue(_QUEUE_LENGTH)
        self._subscribers.add(queue)
        try:
            yield _event(self._state(), "state")
            for item in self.swarm.news:
                yield _event(msgspec.json.encode(item), "news")
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    def _kill(self, wanted: ChaosRequest) -> ChaosReply:
        if not self.swarm.has_chaos:
            raise BadRequest("this node was started without --chaos")
        node = self.swarm.victim(wanted.request_id, wanted.node)
        self._killed[wanted.request_id or ""] = node
        return ChaosReply(node)

    # ------------------------------------------------------------ answers

    async def _complete(self, body: bytes, receive: Receive, send: Send) -> None:
        question = msgspec.json.decode(body)
        self.bodies.append(question)
        if self.script.error:
            await _send_error(send, 503, "pipeline_incomplete", self.script.error)
            return
        await self._stream(receive, send, self._answer(question, f"chatcmpl-{len(self.bodies)}"))

    def _text(self) -> str:
        is_repeated = len(self.bodies) > 1 and self.bodies[-1] == self.bodies[-2]
        if is_repeated and self.script.differs_when_repeated:
            return self.script.answer[:40] + "?" + self.script.answer[41:]
        return self.script.answer

    async def _answer(self, question: dict[str, Any], request_id: str) -> AsyncIterator[bytes]:
        model = question["model"]
        request = RequestView(request_id, model, "decode", 0, _TOKENS_PER_S, 0, self.swarm.route(model))
        nodes = [stage.node for stage in request.stages]
        pieces = re.findall(r"\s*\S{1,6}|\s+$", self._text())
        self._show(request)
        try:
            yield _event(_chunk(request_id, model, {"role": "assistant", "content": ""}))
            for count, piece in enumerate(pieces):
                await self._wait(count)
                if (node := self._killed.pop(request_id, None)) is not None:
                    async for event in self._fail_over(request, node):
                        yield event
                    request = self.swarm.requests[request_id]
                    nodes += [stage.node for stage in request.stages if stage.node not in nodes]
                request = msgspec.structs.replace(request, tokens=count + 1)
                self._show(request, is_told=count % 16 == 0)
                yield _event(_chunk(request_id, model, {"content": piece}))
            yield _event(_chunk(request_id, model, {}, "stop"))
            yield _event(_usage(request_id, model, len(pieces), request.failovers, nodes))
            yield b"data: [DONE]\n\n"
        finally:
            del self.swarm.requests[request_id]
            self._publish([])

    def _show(self, request: RequestView, is_told: bool = True) -> None:
        self.swarm.requests[request.id] = request
        if is_told:
            self._publish([])

    async def _wait(self, count: int) -> None:
        if count == self.script.hold_after:
            await self._released.wait()
            self._released.clear()
            self.script.hold_after = None
        await asyncio.sleep(self.script.pace_s)

    async def _fail_over(self, request: RequestView, node: str) -> AsyncIterator[bytes]:
        swarm = self.swarm
        lost = [f"{stage.node[:8]}:{stage.first}-{stage.last}" for stage in request.stages if stage.node == node]
        known = len(swarm.news)
        swarm.kill_worker(node)
        swarm.requests[request.id] = msgspec.structs.replace(request, phase="recovering")
        self._publish(swarm.news[known:])
        status = {
            "type": "shard_status",
            "shard_id": lost[0],
            "node": node,
            "status": "degraded",
            "reason": "the worker died",
        }
        yield _event(msgspec.json.encode(status), "shard_status")
        await asyncio.sleep(self.script.pace_s * 20)
        stages = swarm.route(request.model)
        names = [f"{stage.node[:8]}:{stage.first}-{stage.last}" for stage in stages]
        self._show(msgspec.structs.replace(request, stages=stages, failovers=request.failovers + 1))
        stands_in = swarm.nodes[stages[-1].node].name
        self._publish(
            [
                swarm.say(
                    "failover", f"{stands_in} took over from {swarm.nodes[node].name} after {_PAUSE_MS:.0f} ms", node
                )
            ]
        )
        failover = {"type": "shard_failover", "lost": lost, "replaced_by": names, "epoch": 2, "pause_ms": _PAUSE_MS}
        yield _event(
            msgspec.json.encode({**failover, "replayed_tokens": request.tokens, "method": "replay"}), "shard_failover"
        )


def _event(data: bytes, name: str = "") -> bytes:
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % data


def _chunk(request_id: str, model: str, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return msgspec.json.encode(
        {"id": request_id, "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    )


def _usage(request_id: str, model: str, tokens: int, failovers: int, nodes: list[str]) -> bytes:
    potluck = {"failovers": failovers, "nodes": nodes, "pause_ms": failovers * _PAUSE_MS}
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": tokens + 9, "potluck": potluck}
    head = {"id": request_id, "object": "chat.completion.chunk", "created": 1, "model": model}
    return msgspec.json.encode({**head, "choices": [], "usage": usage})


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise BadRequest("that is too long")
        if not message.get("more_body"):
            return bytes(body)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_json(send: Send, status: int, value: object) -> None:
    await _start(send, status, b"application/json")
    await send(
        {"type": "http.response.body", "body": value if isinstance(value, bytes) else msgspec.json.encode(value)}
    )


async def _send_error(send: Send, status: int, code: str, message: str) -> None:
    await _send_json(send, status, {"error": {"message": message, "type": code, "param": None, "code": code}})


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), PageServer(script=Script(pace_s=0.05), port=8475) as example:
        print(f"{example.base_url}  (Ctrl+C ends it)")
        threading.Event().wait()
