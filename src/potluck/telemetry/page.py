"""A page with metrics, and nothing else: GET /metrics over plain HTTP, for loopback or a trusted network. Bounded and unhurried."""

import asyncio
from collections.abc import Callable

from potluck.core.errors import BadRequest

_MAX_REQUEST_BYTES = 8192
_PATIENCE_S = 5.0
_MAX_CONNECTIONS = 32


class MetricsPage:
    """Serves what `render` gives until it is closed."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._server: asyncio.Server | None = None
        self._connections = 0
        self.address = ""

    async def start(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise BadRequest(f"{address!r} is not an address; write it like 127.0.0.1:9475")
        self._server = await asyncio.start_server(self._serve, host, int(port), limit=_MAX_REQUEST_BYTES)
        bound = self._server.sockets[0].getsockname()
        self.address = f"{bound[0]}:{bound[1]}"
        return self.address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_PATIENCE_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(request.split(b"\r\n", 1)[0]))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # somebody who does not speak HTTP, or too slowly: nothing to tell them
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, line: bytes) -> bytes:
        parts = line.split(b" ")
        if len(parts) == 3 and parts[0] == b"GET" and parts[1] == b"/metrics":
            body = self._render()
            return _response(b"200 OK", b"text/plain; version=0.0.4; charset=utf-8", body)
        return _response(b"404 Not Found", b"text/plain; charset=utf-8", b"only GET /metrics is here\n")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


def _response(status: bytes, kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (
        status,
        kind,
        len(body),
    )
    return head + body
