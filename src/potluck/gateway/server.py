"""Serves the API inside a node's own loop: uvicorn without its signals, logs and banner; with time limits of ours."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from potluck.core.errors import BadRequest
from potluck.gateway.admission import Tier
from potluck.gateway.answering import Answering
from potluck.gateway.api_keys import is_loopback, load_or_create_api_keys
from potluck.gateway.app import build_app
from potluck.gateway.guarding import GuardSettings
from potluck.gateway.responding import Service, ServiceSettings
from potluck.net.addresses import format_address, parse_address

_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
_HEADER_PATIENCE_S = 10.0
_IDLE_PATIENCE_S = (
    30  # longer than SDKs keep a connection that rests (5 s): whoever closes first must not be the one who is asked
)
_MAX_HEADER_BYTES = 32 << 10
_MAX_CONNECTIONS = 4096


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`address`: port 0 takes any. `key_file` is read, or made, where the address is open to the network."""

    address: str = "127.0.0.1:7470"
    key_file: Path | None = None
    keys: dict[str, Tier] = {}
    allowed_hosts: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()
    service: ServiceSettings = ServiceSettings()
    guard: GuardSettings = GuardSettings()


class _TimedProtocol(H11Protocol):
    """Closes a connection whose headers do not come in time, of any request; uvicorn only minds the silence between requests."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._patience = self.loop.call_later(_HEADER_PATIENCE_S, self._close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._patience is None:
            self._patience = self.loop.call_later(_HEADER_PATIENCE_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """Signals belong to whoever owns the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _is_news(record: logging.LogRecord) -> bool:
    """What runs when the server stops is cancelled, answers and the page's endless stream: no fault of anybody's."""
    is_cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not is_cancelled and "timeout graceful shutdown exceeded" not in record.getMessage()


class GatewayServer:
    """`start` it inside a running loop, `stop` it before the loop ends. `a_key`: one that it takes; `new_key`: made now, to be shown."""

    def __init__(
        self, answering: Answering, settings: GatewaySettings, extend: Callable[[FastAPI], None] | None = None
    ) -> None:
        self.service = Service(answering, settings.service)
        self.address = ""
        self.new_key: str | None = None
        self.a_key: str | None = None
        self._settings, self._extend = settings, extend
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<GatewayServer {self.address or 'not started'} {self.service.gate.admission!r}>"

    @property
    def needs_key(self) -> bool:
        return bool(self._settings.keys) or not is_loopback(parse_address(self.address)[0])

    @property
    def is_everywhere(self) -> bool:
        """Whether it listens at every address of this machine."""
        return parse_address(self.address)[0] in _ANY_HOST

    @property
    def url(self) -> str:
        """As one would type it on this machine."""
        host, port = parse_address(self.address)
        return f"http://{format_address('127.0.0.1' if host in _ANY_HOST else host, port)}"

    async def start(self) -> str:
        """The address with the port that was bound. Raises OSError where it is taken, BadRequest where it is none."""
        host, port = parse_address(self._settings.address)
        guard = self._guard(host)
        bound = _bind(host, port)
        self.address = format_address(host, bound.getsockname()[1])
        config = uvicorn.Config(
            build_app(self.service, guard, self._extend), loop="none", http=_TimedProtocol, ws="none", lifespan="off",
            interface="asgi3", log_config=None, access_log=False, server_header=False, proxy_headers=False,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES, limit_concurrency=_MAX_CONNECTIONS, backlog=2048,
            timeout_graceful_shutdown=2, timeout_keep_alive=_IDLE_PATIENCE_S,
        )  # fmt: skip
        # It says of every rubbish that a scanner sends that it was rubbish, and whoever likes could fill a disk with it.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[bound]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise BadRequest("the API could not be started")
            await asyncio.sleep(0.005)
        return self.address

    async def stop(self) -> None:
        if self._server is None or self._serving is None:
            return
        self.service.is_closing = True
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        # Requests that did not end in time have been cancelled by now; their generations are ended when these are done.
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)

    def _guard(self, host: str) -> GuardSettings:
        keys = dict(self._settings.keys)
        if not is_loopback(host) and not keys:
            if self._settings.key_file is None:
                raise BadRequest("an API that is open to the network needs a key")
            keys, self.new_key = load_or_create_api_keys(self._settings.key_file)
        self.a_key = next(iter(keys), None)
        named = {host, socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"}
        hosts = self._settings.allowed_hosts | (set() if is_loopback(host) else named)
        values: dict[str, Any] = {
            "keys": keys,
            "allowed_hosts": frozenset(hosts),
            "allowed_origins": self._settings.allowed_origins,
        }
        return msgspec.structs.replace(self._settings.guard, **values)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound
