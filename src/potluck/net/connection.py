"""One socket connection, plain or TLS: the handshake, then frames. Moves bytes between asyncio's transport and the wire layer.

Knows nothing of dialling or accepting; whoever made it waits for `opened`.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Protocol, cast

from potluck.core.errors import DialFailed, LinkClosed, PotluckError, ProtocolViolation, WrongPeer
from potluck.identity.certificates import certificate_node_id
from potluck.identity.keys import NodeKey, short_id
from potluck.net.framed_link import CLOSE_TIMEOUT_S, FramedLink, State
from potluck.net.link import Admits, LinkHandler
from potluck.net.sockets import write_together
from potluck.wire.handshake import (
    AUTH_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    VERDICT_BYTES,
    AccepterHandshake,
    DialerHandshake,
    Ticket,
)

# Little may wait in the transport, because nothing overtakes there; the kernel's buffer keeps the wire busy meanwhile.
WRITE_HIGH_BYTES = 128 << 10
WRITE_LOW_BYTES = 32 << 10
_TAKE_BYTES = 256 << 10
_SENDING = (State.OPEN, State.CLOSING)


class Handshake(Protocol):
    """One side's part of the handshake, told whole frames of the size that it waits for."""

    def start(self, presented: bytes | None) -> bytes:
        """The first bytes to send. `presented`: the node id in the other side's certificate, where there is one."""

    @property
    def awaited_bytes(self) -> int: ...

    def advance(self, frame: bytes) -> tuple[bytes, bytes | None]:
        """Bytes to send, and the peer's id once it is welcome. Raises what went wrong; `last_words` go out first."""

    @property
    def last_words(self) -> bytes: ...


class Dialer:
    """HELLO comes, AUTH goes, the verdict comes."""

    last_words = b""

    def __init__(self, key: NodeKey, expected: bytes | None, ticket: Ticket | None = None) -> None:
        self._key = key
        self._expected = expected
        self._ticket = ticket
        self._handshake: DialerHandshake | None = None
        self.awaited_bytes = HELLO_BYTES

    def start(self, presented: bytes | None) -> bytes:
        if presented is not None and self._expected not in (None, presented):
            raise WrongPeer(f"expected node {short_id(self._expected)}, found {short_id(presented)}")
        expected = presented or self._expected
        self._handshake = DialerHandshake(self._key, expected, os.urandom(NONCE_BYTES), self._ticket)
        return b""

    def advance(self, frame: bytes) -> tuple[bytes, bytes | None]:
        handshake = cast(DialerHandshake, self._handshake)
        if not handshake.accepter:
            self.awaited_bytes = VERDICT_BYTES
            return handshake.auth(frame), None
        handshake.check_verdict(frame)
        return b"", handshake.accepter


class Accepter:
    """HELLO goes, AUTH comes, the verdict goes."""

    awaited_bytes = AUTH_BYTES

    def __init__(self, key: NodeKey, admits: Admits) -> None:
        self._admits = admits
        self._handshake = AccepterHandshake(key, os.urandom(NONCE_BYTES))
        self.last_words = b""

    def start(self, presented: bytes | None) -> bytes:
        return self._handshake.hello

    def advance(self, frame: bytes) -> tuple[bytes, bytes | None]:
        dialer = self._handshake.check_auth(frame)
        refusal = self._admits(dialer, self._handshake.ticket)
        verdict = self._handshake.verdict(refusal)
        if refusal is None:
            return verdict, dialer
        self.last_words = verdict
        raise LinkClosed(f"node {short_id(dialer)} was turned away: {refusal}")


class Connection(FramedLink, asyncio.Protocol):
    """A Link over a stream socket. `opened` yields when the handshake is done, and raises when it fails."""

    def __init__(
        self,
        handshake: Handshake,
        handler: LinkHandler,
        handshake_timeout_s: float,
        on_settled: Callable[["Connection"], None] | None = None,
    ) -> None:
        """`on_settled`: called once, when the connection is no longer half open, for good or ill."""
        super().__init__(handler, b"", State.HANDSHAKE)
        self._loop = asyncio.get_running_loop()
        self._handshake = handshake
        self._handshake_timeout_s = handshake_timeout_s
        self._on_settled = on_settled
        self._transport: asyncio.Transport | None = None
        self._received = b""  # the beginning of a handshake frame
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.on_ended: Callable[[Connection], None] | None = None  # told once, however it ends
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.opened.add_done_callback(_retrieve)

    def cut(self, reason: str) -> None:
        """Ends the link from this side, and reports it lost."""
        self._break(reason)

    # ---------------------------------------------------------------- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._state is State.CLOSED:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        self._timer = self._loop.call_later(
            self._handshake_timeout_s, self._fail, DialFailed("the handshake took too long")
        )
        try:
            first = self._handshake.start(_presented_id(transport))
        except PotluckError as error:
            self._fail(error)
            return
        if first:
            self._transport.write(first)

    def data_received(self, data: bytes) -> None:
        if self._state is State.HANDSHAKE:
            data = self._shake_hands(data)
        if data and self._state is not State.CLOSED:
            self._receive(data)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = "closed by the other side" if exc is None else f"connection lost: {exc}"
        if self._state is State.HANDSHAKE:
            self._end(DialFailed(f"the handshake was cut short ({reason})"))
        elif self._state is not State.CLOSED:
            self._lose(reason)

    # ---------------------------------------------------------------- the handshake

    def _shake_hands(self, data: bytes) -> bytes:
        """Returns what came after the handshake."""
        data = self._received + data
        awaited_bytes = self._handshake.awaited_bytes
        if len(data) < awaited_bytes:
            self._received = data
            return b""
        self._received = b""
        try:
            return self._advance(data[:awaited_bytes], data[awaited_bytes:])
        except PotluckError as error:
            self._fail(error)
            return b""

    def _advance(self, frame: bytes, rest: bytes) -> bytes:
        answer, peer = self._handshake.advance(frame)
        if answer and rest:
            raise ProtocolViolation("the other side did not wait for the answer in the handshake")
        if answer:
            cast(asyncio.Transport, self._transport).write(answer)
        if peer is not None:
            self._open(peer)
        return rest

    def _open(self, peer: bytes) -> None:
        self.peer = peer
        self._state = State.OPEN
        self._settle()
        if not self.opened.done():  # cancelled, and about to be aborted by whoever dialled
            self.opened.set_result(None)

    def _fail(self, error: PotluckError) -> None:
        """The handshake failed. A dialer that was turned away is told so; anybody else just sees the connection end."""
        self._end(error)
        transport = cast(asyncio.Transport, self._transport)
        if self._handshake.last_words:
            transport.write(self._handshake.last_words)
            self._leave()
        else:
            transport.abort()

    def _end(self, error: PotluckError) -> None:
        super()._end(error)
        self._settle()
        if not self.opened.done():
            self.opened.set_exception(error)
        on_ended, self.on_ended = self.on_ended, None
        if on_ended is not None:
            on_ended(self)

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._on_settled is not None:
            self._on_settled(self)
            self._on_settled = None

    # ---------------------------------------------------------------- what a framed link needs

    def _flush(self) -> None:
        while not self._is_paused and self._state in _SENDING and (buffers := self._channel.writer.take(_TAKE_BYTES)):
            write_together(cast(asyncio.Transport, self._transport), buffers)

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        transport = cast(asyncio.Transport, self._transport)
        transport.close()
        self._loop.call_later(CLOSE_TIMEOUT_S, transport.abort)

    def _start_closing(self) -> None:
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self.abort)


def _presented_id(transport: asyncio.BaseTransport) -> bytes | None:
    """The node id in the accepter's certificate, on TLS and for the dialer; an accepter is never shown one."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None or tls.server_side:
        return None
    return certificate_node_id(tls.getpeercert(binary_form=True) or b"")


def _retrieve(future: asyncio.Future[None]) -> None:
    """Nobody need ask why a connection failed."""
    if not future.cancelled():
        future.exception()
