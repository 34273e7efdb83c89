"""The API in this process over models without numbers, and what its streams look like to a client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from potluck.gateway.app import build_app
from potluck.gateway.guarding import GuardSettings
from potluck.gateway.responding import Service, ServiceSettings
from potluck.testing.memory_answering import MemoryAnswering

URL = "http://127.0.0.1:7470"
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def app_of(
    answering: MemoryAnswering, settings: ServiceSettings | None = None, guard: GuardSettings | None = None
) -> Any:
    return build_app(Service(answering, settings or ServiceSettings()), guard or GuardSettings())


def with_client(
    app: Any, use: Callable[[httpx.AsyncClient], Awaitable[Any]], headers: dict[str, str] | None = None
) -> Any:
    async def inside() -> Any:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            return await use(client)

    return asyncio.run(inside())


def post(app: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return with_client(app, lambda client: client.post(path, content=data, headers=shown))


def get(app: Any, path: str, **headers: str) -> httpx.Response:
    return with_client(app, lambda client: client.get(path, headers=headers))


def events_of(response: httpx.Response) -> list[tuple[str | None, Any]]:
    """Server-sent events as (name, data); `[DONE]` stays text, comments come as (":", text)."""
    events: list[tuple[str | None, Any]] = []
    assert response.text.endswith("\n\n")
    for block in response.text.split("\n\n")[:-1]:
        name, data = None, None
        for line in block.split("\n"):
            if line.startswith(":"):
                events.append((":", line[1:].strip()))
            elif line.startswith("event: "):
                name = line[7:]
            elif not line.startswith("id: "):
                assert line.startswith("data: "), line
                data = line[6:] if line == "data: [DONE]" else json.loads(line[6:])
        events.append((name, data))
    return events  # a comment is a line, and belongs to no event


def deltas_of(response: httpx.Response) -> list[Any]:
    return [data for _, data in events_of(response) if isinstance(data, dict)]
