"""Stream sockets set up the way links need them, with the options that each operating system has. Also names and look-ups."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Protocol

from potluck.core.errors import BadRequest
from potluck.net.addresses import format_address, parse_address

BACKLOG = 128
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT = 3
# A peer that acknowledges nothing for so long is gone. Steps have shorter deadlines; this is for links that nobody waits on.
UNACKNOWLEDGED_TIMEOUT_S = 20
# What the kernel may hold beyond what is in flight: nothing overtakes there.
UNSENT_BYTES = 256 << 10
_JOIN_BYTES = 64 << 10


class TunableSocket(Protocol):
    """Python's, or what a loop shows of its own."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None: ...


def write_together(transport: asyncio.WriteTransport, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
    """In one write where they are small: a copy costs less than a second buffer does, 10 µs of a small step's way."""
    if len(buffers) == 1:
        transport.write(buffers[0])
    elif sum(map(len, buffers)) <= _JOIN_BYTES:
        transport.write(b"".join(buffers))
    else:
        transport.writelines(buffers)


def tune_socket(tcp: TunableSocket) -> None:
    """No delay for small frames; a peer that vanished without a word is noticed."""
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_TIMEOUT_S * 1000),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):  # known to Python, unknown to this kernel
                tcp.setsockopt(socket.IPPROTO_TCP, option, value)


def reason_of(error: OSError) -> str:
    """In the system's words, without what the library adds to them."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


async def bind(address: str) -> socket.socket:
    """A listening socket. Raises BadRequest when the address cannot be bound."""
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    try:
        family, _, _, _, target = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        listening = socket.create_server(target[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadRequest(
            f"cannot listen on {address}: {reason_of(error)}; choose another place with --listen"
        ) from error
    listening.setblocking(False)
    return listening


def bound_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return format_address(host, port)
