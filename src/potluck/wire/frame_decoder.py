"""Frames to messages: bytes cut anywhere in, whole messages and credits out. No I/O.

Every limit is checked on the header, and those of a message's type as soon as it is known: what cannot be is not waited for.
"""

from collections.abc import Callable
from typing import cast

import msgspec

from potluck.core.errors import ProtocolViolation, WireMisuse
from potluck.core.limits import TENSOR_CHUNK_BYTES, TENSOR_FLOW_CONTROL_WINDOW
from potluck.wire.frames import (
    CHUNK,
    CREDIT,
    GOODBYE,
    HEADER,
    HEADER_BYTES,
    LONG_MESSAGE,
    MAX_BODY_BYTES,
    MAX_BUSY_STREAMS,
    MAX_HALF_RECEIVED,
    MAX_HALF_RECEIVED_BYTES,
    MAX_LONG_META_BYTES,
    MAX_META_BYTES,
    MESSAGE,
    URGENT_BYTES,
    Buffer,
    Credited,
    Ended,
    Event,
    Progress,
    Received,
    is_urgent,
    message_stream,
)
from potluck.wire.messages import Message, Open, Rewire

_decode: Callable[[memoryview], Message] = msgspec.msgpack.Decoder(Message).decode


class _Incoming:
    """A message that has not arrived whole."""

    __slots__ = ("body_bytes", "data", "kind", "message", "meta_bytes", "stream", "total_bytes")

    def __init__(self, kind: int, stream: int, meta_bytes: int, body_bytes: int) -> None:
        self.kind = kind
        self.stream = stream
        self.meta_bytes = meta_bytes
        self.body_bytes = body_bytes
        self.total_bytes = meta_bytes + body_bytes
        self.data = bytearray()  # grows with what arrives, never with what was announced
        self.message: Message | None = None  # as soon as the meta is there


class HalfReceived:
    """What messages that were begun come to when complete, on all connections that share it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<HalfReceived {self.used_bytes} of {self.most_bytes} bytes>"


class FrameDecoder:
    """Bytes of one connection, cut anywhere, to events. After the first ProtocolViolation it raises for ever."""

    def __init__(self) -> None:
        self._header = b""  # the beginning of a header
        self._current: _Incoming | None = None  # whose frame is being received
        self._frame_left = 0
        self._half_received: dict[int, _Incoming] = {}
        self._half_received_bytes = 0  # when complete
        self._shared = HalfReceived(MAX_HALF_RECEIVED_BYTES)
        self._ungranted: dict[int, int] = {}
        self._is_ended = False
        self._violation: str | None = None

    def __repr__(self) -> str:
        state = self._violation or f"{len(self._half_received)} messages half received"
        return f"<FrameDecoder {state}>"

    def feed(self, data: bytes) -> list[Event]:
        """What these bytes complete, in order. Raises ProtocolViolation; what came with the offending bytes is lost."""
        if self._violation is not None:
            raise ProtocolViolation(self._violation)
        events: list[Event] = []
        try:
            self._parse(data, events)
        except ProtocolViolation as violation:
            self._violation = str(violation)
            self._header, self._current = b"", None
            self._half_received.clear()
            raise
        return events

    @property
    def is_between_messages(self) -> bool:
        """Whether what comes next begins a message, and nothing is amiss."""
        return not (self._header or self._frame_left or self._half_received or self._is_ended or self._violation)

    def share(self, shared: HalfReceived) -> None:
        """From now on the bound holds for all who share it, beside the one of each."""
        self._shared.used_bytes -= self._half_received_bytes
        self._shared = shared
        shared.used_bytes += self._half_received_bytes

    def end(self) -> None:
        """Nothing more comes; what was half received is forgotten."""
        self._violation = self._violation or "more after the end"
        self._half_received.clear()
        self._current = None
        self._count_half_received(-self._half_received_bytes)

    def grant(self, stream: int, chunks: int) -> None:
        """Chunks of a stream were consumed: the sender may send as many more."""
        left = self._ungranted.get(stream, 0) - chunks
        if left < 0:
            raise WireMisuse(f"{-left} chunks more granted than were received")
        if left:
            self._ungranted[stream] = left
        else:
            self._ungranted.pop(stream, None)

    def _parse(self, data: bytes, events: list[Event]) -> None:
        place, end = 0, len(data)
        if self._frame_left:
            place = self._continue_frame(data, 0, events)
        elif self._header:
            data = self._header + data
            self._header, end = b"", len(data)
        view = memoryview(data)
        while place + HEADER_BYTES <= end:
            kind, flags, reserved, stream, payload, meta, body, value = HEADER.unpack_from(data, place)
            if self._is_ended:
                raise ProtocolViolation("more after goodbye")
            if flags or reserved:
                raise ProtocolViolation("a frame with unknown flags")
            place += HEADER_BYTES
            if kind == MESSAGE and payload == meta + body <= end - place and meta <= URGENT_BYTES >= body and not value:
                # The common case by far, a small message that arrived whole, takes the short way.
                stop = place + meta
                message = self._message(kind, stream, view[place:stop], body)
                if stream in self._half_received:
                    raise ProtocolViolation("a message inside another one of its stream")
                place = stop + body
                events.append(Received(message, data[stop:place], stream, 0))
                continue
            if kind >= CREDIT:
                events.append(self._control(kind, stream, payload, meta, body, value))
                continue
            self._begin_frame(kind, stream, payload, meta, body, value)
            place = self._continue_frame(view, place, events)
        if place < end:
            self._header = data[place:]
            if self._is_ended:
                raise ProtocolViolation("more after goodbye")

    def _control(self, kind: int, stream: int, payload: int, meta: int, body: int, value: int) -> Event:
        is_bare = not (payload or meta or body)
        if kind == CREDIT and is_bare and 1 <= value <= TENSOR_FLOW_CONTROL_WINDOW:
            return Credited(stream, value)
        if kind == GOODBYE and is_bare and not (stream or value):
            self._is_ended = True
            return Ended()
        raise ProtocolViolation("a frame of unknown kind, or a malformed one")

    def _begin_frame(self, kind: int, stream: int, payload: int, meta: int, body: int, value: int) -> None:
        if kind == CHUNK:
            incoming = self._continued(stream, payload, meta, body, value)
        elif kind in (MESSAGE, LONG_MESSAGE):
            incoming = self._started(kind, stream, payload, meta, body, value)
        else:
            raise ProtocolViolation("a frame of unknown kind, or a malformed one")
        self._current = incoming
        self._frame_left = payload

    def _started(self, kind: int, stream: int, payload: int, meta: int, body: int, value: int) -> _Incoming:
        total = meta + body
        if (
            not 1 <= meta <= (MAX_LONG_META_BYTES if kind == LONG_MESSAGE else MAX_META_BYTES)
            or body > (MAX_BODY_BYTES if kind == MESSAGE else 0)
            or value
        ):
            raise ProtocolViolation("a message larger than allowed")
        if stream in self._half_received:
            raise ProtocolViolation("a message inside another one of its stream")
        if is_urgent(meta, body):
            if payload != total:
                raise ProtocolViolation("a small message in pieces")
        else:
            self._check_chunk(stream, payload, total)
        if payload < total:
            self._check_half_received(total)
        return _Incoming(kind, stream, meta, body)

    def _continued(self, stream: int, payload: int, meta: int, body: int, value: int) -> _Incoming:
        incoming = self._half_received.get(stream)
        if incoming is None or meta or body or value != len(incoming.data):
            raise ProtocolViolation("a chunk that continues nothing")
        self._check_chunk(stream, payload, incoming.total_bytes - value)
        return incoming

    def _check_chunk(self, stream: int, payload: int, left: int) -> None:
        """`left`: what is still to come of the message. Only its last chunk may be small, or there could be millions."""
        if not min(left, URGENT_BYTES) <= payload <= min(left, TENSOR_CHUNK_BYTES):
            raise ProtocolViolation("a chunk of the wrong size")
        ungranted = self._ungranted.get(stream, 0) + 1
        if ungranted > TENSOR_FLOW_CONTROL_WINDOW or len(self._ungranted) > MAX_BUSY_STREAMS:
            raise ProtocolViolation("more chunks than credit")
        self._ungranted[stream] = ungranted

    def _check_half_received(self, total: int) -> None:
        self._count_half_received(total)
        if (
            len(self._half_received) >= MAX_HALF_RECEIVED
            or self._half_received_bytes > MAX_HALF_RECEIVED_BYTES
            or self._shared.used_bytes > self._shared.most_bytes
        ):
            raise ProtocolViolation("too many messages begun and not finished")

    def _count_half_received(self, more_bytes: int) -> None:
        self._half_received_bytes += more_bytes
        self._shared.used_bytes += more_bytes

    def _continue_frame(self, data: Buffer, place: int, events: list[Event]) -> int:
        """Take what there is of the current frame's payload; returns where it ends in the data."""
        incoming = cast(_Incoming, self._current)
        stop = min(place + self._frame_left, len(data))
        incoming.data += data if stop - place == len(data) else memoryview(data)[place:stop]
        self._frame_left -= stop - place
        if not self._frame_left:
            self._end_frame(incoming, events)
        return stop

    def _end_frame(self, incoming: _Incoming, events: list[Event]) -> None:
        self._current = None
        chunks = 0 if is_urgent(incoming.meta_bytes, incoming.body_bytes) else 1
        self._look_at_meta(incoming)
        if incoming.message is None or len(incoming.data) < incoming.total_bytes:
            self._half_received[incoming.stream] = incoming
            events.append(Progress(incoming.stream, chunks))
            return
        if self._half_received.pop(incoming.stream, None) is not None:
            self._count_half_received(-incoming.total_bytes)
        with memoryview(incoming.data) as view:
            body = bytes(view[incoming.meta_bytes :])
        events.append(Received(incoming.message, body, incoming.stream, chunks))

    def _look_at_meta(self, incoming: _Incoming) -> None:
        """Not only when all is there: a body that its type cannot have must not be waited for."""
        if incoming.message is None and len(incoming.data) >= incoming.meta_bytes:
            with memoryview(incoming.data) as view:
                incoming.message = self._message(
                    incoming.kind, incoming.stream, view[: incoming.meta_bytes], incoming.body_bytes
                )

    def _message(self, kind: int, stream: int, meta: memoryview, body_bytes: int) -> Message:
        try:
            message = _decode(meta)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # Without the decoder's text: it may quote what was received.
            raise ProtocolViolation("a message that is none of ours, or with values out of range") from error
        if message_stream(message) != stream:
            raise ProtocolViolation("a message on a stream that is not its session's")
        if kind == LONG_MESSAGE and not isinstance(message, Open | Rewire):
            raise ProtocolViolation("a long message of a type that is never long")
        if body_bytes > message.most_body_bytes:
            raise ProtocolViolation("a body that messages of its type do not have, or larger than theirs")
        return message
