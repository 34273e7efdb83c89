"""What all links have in common: their states, and messages to frames and back. How the frames travel, subclasses say."""

import abc
import enum
from collections.abc import Callable

from potluck.core.errors import LinkClosed, LinkFull, PotluckError, ProtocolViolation
from potluck.identity.keys import short_id
from potluck.net.link import LinkHandler
from potluck.wire.channel import Channel
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.frame_decoder import HalfReceived
from potluck.wire.frames import Buffer, Received
from potluck.wire.messages import Message

OnArrival = Callable[[bytes], None]
CLOSE_TIMEOUT_S = 5.0  # for what is queued to leave, when a link is closed


class State(enum.Enum):
    """HANDSHAKE → OPEN → CLOSING → CLOSED, with short cuts to CLOSED."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSING = "closing"  # our side closed; what is queued is being sent, then we wait for the other side to leave
    CLOSED = "closed"


class FramedLink(abc.ABC):
    """A Link, except for how frames are moved."""

    def __init__(self, handler: LinkHandler, peer: bytes, state: State) -> None:
        self.peer = peer
        self._handler = handler
        self._state = state
        self._channel = Channel()
        self._foreseen: tuple[ForeseenStep, OnArrival] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {short_id(self.peer)} {self._state.value}, {self.queued_bytes} bytes queued>"

    @property
    def queued_bytes(self) -> int:
        return self._channel.writer.queued_bytes

    def send(self, message: Message, body: Buffer = b"", *, is_more: bool = False) -> None:
        if self._state is not State.OPEN:
            raise LinkClosed(f"the link to node {short_id(self.peer)} is {self._state.value}")
        self._channel.writer.push(message, body)
        if not is_more:
            self._flush()

    def send_foreseen(self, step: ForeseenStep, spent: bytes, body: bytes) -> None:
        if self._state is not State.OPEN:
            raise LinkClosed(f"the link to node {short_id(self.peer)} is {self._state.value}")
        self._channel.writer.push_frame(step.stream, step.frame(spent, body))
        self._flush()

    def foresee(self, step: ForeseenStep, on_arrival: OnArrival) -> None:
        self._foreseen = step, on_arrival

    def hold(self, session: bytes) -> None:
        self._channel.hold(session)

    def release(self, session: bytes) -> None:
        self._channel.release(session)
        self._flush()

    def share_memory(self, shared: HalfReceived) -> None:
        """For what has begun to arrive, with the node's other links."""
        self._channel.share(shared)

    def close(self) -> None:
        if self._state is State.OPEN:
            self._state = State.CLOSING
            self._channel.writer.finish()
            self._start_closing()
            self._flush()
        elif self._state is State.HANDSHAKE:
            self.abort()

    def abort(self) -> None:
        if self._state is not State.CLOSED:
            self._end(LinkClosed("closed by this side"))
            self._disconnect()

    def _end(self, error: PotluckError) -> None:
        """Nothing moves after this. `error`: for whoever still waits for the link to open."""
        self._state = State.CLOSED
        self._channel.end()

    def _lose(self, reason: str) -> None:
        """The other side is gone, or was made to go; tell the handler unless it ended the link itself."""
        was_open = self._state is State.OPEN
        self._end(LinkClosed(reason))
        if was_open:
            self._handler.on_lost(self, reason)

    def _receive(self, data: bytes) -> None:
        if self._foreseen is not None:
            self._tell_arrival(data, *self._foreseen)
        try:
            received = self._channel.receive(data)
        except ProtocolViolation as violation:
            self._break(f"protocol violation: {violation}")
            return
        for each in received:
            if self._state is State.OPEN:
                self._handler.on_message(self, each.message, each.body)
            if each.chunks:
                self._consumed(each)
        if self._channel.is_ended and self._state is not State.CLOSED:
            self._lose("closed by the other side")
            self._leave()
        else:
            self._flush()

    def _tell_arrival(self, data: bytes, step: ForeseenStep, on_arrival: OnArrival) -> None:
        self._foreseen = None
        if self._state is State.OPEN and self._channel.is_between_messages and (body := step.body_in(data)) is not None:
            on_arrival(body)

    def _consumed(self, received: Received) -> None:
        try:
            self._channel.consumed(received)
        except LinkFull as full:
            self._break(str(full))

    def _break(self, reason: str) -> None:
        """End a link from this side, and report it."""
        if self._state is not State.CLOSED:
            self._lose(reason)
            self._disconnect()

    @abc.abstractmethod
    def _flush(self) -> None:
        """Move what may be sent now."""

    @abc.abstractmethod
    def _disconnect(self) -> None:
        """Cut the connection without further words."""

    @abc.abstractmethod
    def _start_closing(self) -> None:
        """What is queued is to be sent, and the other side to leave, within a bounded time."""

    @abc.abstractmethod
    def _leave(self) -> None:
        """The other side waits for us to end the connection."""
