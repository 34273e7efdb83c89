"""A client for scripts: `from potluck import Client`. Talks HTTP to a node's API and hands out typed events, diagnostics among them.

Imports nothing else of Potluck, so that a script needs neither a model nor a node of its own.
"""

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import httpx
import msgspec

DEFAULT_URL = "http://127.0.0.1:7470"
_TIMEOUT = httpx.Timeout(30.0, read=600.0)
Messages = str | Sequence[Mapping[str, Any]]


class ApiError(Exception):
    """What the node answered instead of text. `code` is stable and stands in docs/errors.md."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(f"{message} [{code}]")
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s


class Text(msgspec.Struct, frozen=True):
    """A further piece of a choice's text."""

    text: str
    choice: int = 0


class ToolCall(msgspec.Struct, frozen=True):
    """A piece of a tool call: with `name` its beginning, otherwise more of its arguments' JSON text."""

    index: int
    arguments: str
    call_id: str = ""
    name: str = ""
    choice: int = 0


class ShardStatus(msgspec.Struct, frozen=True):
    shard_id: str
    node: str
    status: str
    reason: str = ""
    code: str = ""
    choice: int = 0


class ShardFailover(msgspec.Struct, frozen=True):
    """A lost shard was replaced, and the answer went on."""

    lost: tuple[str, ...]
    replaced_by: tuple[str, ...]
    epoch: int
    pause_ms: float
    replayed_tokens: int
    method: str
    choice: int = 0
    exactness: str = "bitwise"


class PipelineAborted(msgspec.Struct, frozen=True):
    code: str
    message: str
    generated_tokens: int
    choice: int = 0


class Finished(msgspec.Struct, frozen=True):
    """A choice has ended: `stop`, `length` or `tool_calls`."""

    reason: str
    choice: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    failovers: int = 0
    pause_ms: float = 0.0
    nodes: tuple[str, ...] = ()
    exactness: str = (
        "bitwise"  # or batch-invariant, tolerance, mixed: what the answer depended on beside its own tokens
    )
    model: str = ""  # that answered, also where none was named


Event = Text | ToolCall | ShardStatus | ShardFailover | PipelineAborted | Finished | Usage
_FRAMES: dict[str, type[ShardStatus] | type[ShardFailover] | type[PipelineAborted]] = {
    "shard_status": ShardStatus, "shard_failover": ShardFailover, "pipeline_aborted": PipelineAborted
}  # fmt: skip


class Answer(NamedTuple):
    """A whole answer; `events` has everything in the order in which it came."""

    text: str
    reason: str
    usage: Usage
    events: tuple[Event, ...]


class _Reader:
    """Lines of server-sent events into events. No I/O."""

    def __init__(self) -> None:
        self._name = ""

    def line(self, line: str) -> list[Event]:
        if line.startswith("event: "):
            self._name = line[7:]
        elif line.startswith("data: ") and line != "data: [DONE]":
            return self._data(msgspec.json.decode(line[6:]))
        elif not line:
            self._name = ""
        return []

    def _data(self, data: dict[str, Any]) -> list[Event]:
        if self._name in _FRAMES:
            return [msgspec.convert(data, _FRAMES[self._name])]
        if "error" in data:
            raise ApiError(200, str(data["error"].get("code")), str(data["error"].get("message")))
        events: list[Event] = []
        for choice in data.get("choices", ()):
            events += _choice_events(choice)
        if data.get("usage"):
            events.append(_usage(data["usage"], str(data.get("model") or "")))
        return events


def _choice_events(choice: dict[str, Any]) -> list[Event]:
    index, delta = choice["index"], choice["delta"]
    events: list[Event] = [Text(delta["content"], index)] if delta.get("content") else []
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        piece = ToolCall(
            call["index"], function.get("arguments", ""), call.get("id", ""), function.get("name", ""), index
        )
        events.append(piece)
    if choice.get("finish_reason"):
        events.append(Finished(choice["finish_reason"], index))
    return events


def _usage(data: dict[str, Any], model: str) -> Usage:
    told = data.get("potluck") or {}
    return Usage(
        data["prompt_tokens"], data["completion_tokens"], told.get("failovers", 0), told.get("pause_ms", 0.0),
        tuple(told.get("nodes", ())), told.get("exactness", "bitwise"), model,
    )  # fmt: skip


def _body(messages: Messages, model: str | None, fields: Mapping[str, Any]) -> bytes:
    told = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"messages": told, "stream": True, "stream_options": {"include_usage": True}, **fields}
    return json.dumps(body if model is None else {**body, "model": model}).encode()


def _headers(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Potluck-Diagnostics": "events"}
    chosen = key or os.environ.get("POTLUCK_API_KEY")
    return headers if chosen is None else {**headers, "Authorization": f"Bearer {chosen}"}


def _error(response: httpx.Response) -> ApiError:
    """Of a response whose body has been read."""
    try:
        told = response.json()["error"]
        code, message = str(told["code"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "unknown", f"the server answered with status {response.status_code}"
    wait = response.headers.get("retry-after", "")
    return ApiError(response.status_code, code, message, int(wait) if wait.isdigit() else None)


def _gathered(events: Sequence[Event]) -> Answer:
    """The first choice's text; all choices are in the events."""
    text = "".join(event.text for event in events if isinstance(event, Text) and event.choice == 0)
    reason = next((event.reason for event in events if isinstance(event, Finished) and event.choice == 0), "")
    usage = next((event for event in events if isinstance(event, Usage)), Usage(0, 0))
    return Answer(text, reason, usage, tuple(events))


class Client:
    """Synchronous. `url` is a node's API; `key` defaults to POTLUCK_API_KEY. Further fields are those of chat completions."""

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None, model: str | None = None) -> None:
        self._model = model
        self._http = httpx.Client(base_url=url, headers=_headers(key), timeout=_TIMEOUT, trust_env=False)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        response = self._http.get("/v1/models")
        if response.status_code != 200:
            raise _error(response)
        return [model["id"] for model in response.json()["data"]]

    def chat(self, messages: Messages, **fields: Any) -> Iterator[Event]:
        """Events as they come. Leaving the loop early ends the generation. Raises ApiError, also in the middle."""
        reader = _Reader()
        with self._http.stream(
            "POST", "/v1/chat/completions", content=_body(messages, self._model, fields)
        ) as response:
            if response.status_code != 200:
                response.read()
                raise _error(response)
            for line in response.iter_lines():
                yield from reader.line(line)

    def ask(self, messages: Messages, **fields: Any) -> Answer:
        """The whole answer."""
        return _gathered(list(self.chat(messages, **fields)))


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None, model: str | None = None) -> None:
        self._model = model
        limits = httpx.Limits(max_connections=1024)
        self._http = httpx.AsyncClient(
            base_url=url, headers=_headers(key), timeout=_TIMEOUT, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        response = await self._http.get("/v1/models")
        if response.status_code != 200:
            raise _error(response)
        return [model["id"] for model in response.json()["data"]]

    async def chat(self, messages: Messages, **fields: Any) -> AsyncIterator[Event]:
        reader = _Reader()
        body = _body(messages, self._model, fields)
        async with self._http.stream("POST", "/v1/chat/completions", content=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _error(response)
            async for line in response.aiter_lines():
                for event in reader.line(line):
                    yield event

    async def ask(self, messages: Messages, **fields: Any) -> Answer:
        return _gathered([event async for event in self.chat(messages, **fields)])
