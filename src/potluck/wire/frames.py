"""Messages to frames and back: fixed binary headers, chunks, credits, priorities. No I/O; does not know what messages mean.

A message is its msgpack form (`meta`) followed by its body. Together they travel in frames of at most TENSOR_CHUNK_BYTES, on the
stream of their session (the first four bytes of its id; 0 without a session). Small messages travel whole and overtake the bulk of
other streams; bulk is sent on credit. Within a stream order is kept. Limits are checked on the header, before memory is taken.
"""

import enum
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from potluck.core.errors import LinkFull, ProtocolViolation, WireMisuse
from potluck.core.limits import TENSOR_CHUNK_BYTES, TENSOR_FLOW_CONTROL_WINDOW
from potluck.wire.messages import Message, Open, Rewire

URGENT_BYTES = 64 << 10  # meta and body up to this size each: one frame, no credit needed, overtakes bulk
MAX_META_BYTES = 256 << 10
MAX_LONG_META_BYTES = 8 << 20  # Open and Rewire, which carry a session's tokens
MAX_BODY_BYTES = 256 << 20
MAX_HALF_RECEIVED = 64  # messages of several frames under way in one direction …
MAX_HALF_RECEIVED_BYTES = 512 << 20  # … and what they come to when complete
MAX_BUSY_STREAMS = 1 << 16  # streams with chunks that were not credited yet
MAX_QUEUED_BYTES = 320 << 20
URGENT_RESERVE_BYTES = 4 << 20  # room beyond that for small messages, so that a full queue can still be told to stop
_QUEUED_OVERHEAD_BYTES = 256  # what an entry costs beside its bytes

# kind, flags, reserved, stream, payload in this frame, meta and body of the whole message, value
HEADER = struct.Struct("<BBHIIIII")
HEADER_BYTES = HEADER.size

Buffer = bytes | memoryview

_encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[memoryview], Message] = msgspec.msgpack.Decoder(Message).decode


class Kind(enum.IntEnum):
    MESSAGE = 1  # the first frame of a message; its payload starts with meta
    LONG_MESSAGE = 2  # the same for Open and Rewire with a long meta
    CHUNK = 3  # the stream's message goes on; value: offset of the payload within it
    CREDIT = 4  # no payload; value: how many chunks of this stream were consumed
    GOODBYE = 5  # nothing follows; without it whoever closes might cut off what the other side has not read yet


# Plain numbers, because looking up an enum's member takes longer than the rest of the comparison.
_MESSAGE, _LONG_MESSAGE, _CHUNK, _CREDIT, _GOODBYE = (int(kind) for kind in Kind)


class Received(msgspec.Struct, frozen=True, gc=False):
    """A whole message. `chunks` is what its last frame took of the window, to be granted again when it was consumed."""

    message: Message
    body: bytes
    stream: int
    chunks: int


class Progress(msgspec.Struct, frozen=True, gc=False):
    """A chunk of a message that goes on; granting it lets the sender continue."""

    stream: int
    chunks: int


class Credited(msgspec.Struct, frozen=True, gc=False):
    """The other side consumed chunks of ours."""

    stream: int
    chunks: int


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The other side has said all it had to say."""


Event = Received | Progress | Credited | Ended


def stream_of(session: bytes) -> int:
    """The stream of a session. Two sessions on one stream merely share order and window, which harms neither."""
    return int.from_bytes(session[:4], "little")


def _message_stream(message: Message) -> int:
    return int.from_bytes(getattr(message, "session", b"")[:4], "little")


def _is_urgent(meta_bytes: int, body_bytes: int) -> bool:
    return meta_bytes <= URGENT_BYTES and body_bytes <= URGENT_BYTES


# ---------------------------------------------------------------- sending


class _Bulk:
    """A queued message that goes out in chunks."""

    __slots__ = ("body", "kind", "meta", "sent_bytes", "total_bytes")

    def __init__(self, kind: int, meta: bytes, body: memoryview) -> None:
        self.kind = kind
        self.meta = meta
        self.body = body
        self.sent_bytes = 0
        self.total_bytes = len(meta) + len(body)

    @property
    def is_several_frames(self) -> bool:
        return self.total_bytes > TENSOR_CHUNK_BYTES

    def take_chunk(self, stream: int) -> list[Buffer]:
        """The next frame: one header (with what it holds of meta) and a view of the body, never a copy of it."""
        start = self.sent_bytes
        stop = min(start + TENSOR_CHUNK_BYTES, self.total_bytes)
        self.sent_bytes = stop
        meta_bytes, body_bytes = len(self.meta), len(self.body)
        if start == 0:
            header = HEADER.pack(self.kind, 0, 0, stream, stop, meta_bytes, body_bytes, 0)
        else:
            header = HEADER.pack(_CHUNK, 0, 0, stream, stop - start, 0, 0, start)
        frame: list[Buffer] = [header + self.meta[start:stop]]
        if stop > meta_bytes:
            frame.append(self.body[max(start - meta_bytes, 0) : stop - meta_bytes])
        return frame


class _Outgoing:
    """A stream with bulk to send, or with chunks that were not credited yet."""

    __slots__ = ("is_ready", "number", "queue", "uncredited")

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: deque[_Bulk | bytes] = deque()  # bytes: a small message, complete, that waits for bulk before it
        self.uncredited = 0
        self.is_ready = False


class FrameWriter:
    """What is to be sent on one connection, in the order in which it should leave.

    `push` queues, `take` hands out buffers, `credit` is told what the other side consumed, `grant` what we did.
    """

    def __init__(self, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._queued_bytes = 0
        self._grants: dict[int, int] = {}
        self._urgent: deque[bytes] = deque()
        self._streams: dict[int, _Outgoing] = {}
        self._ready: deque[_Outgoing] = deque()  # may send a chunk now; taken in turn
        self._unstarted: deque[_Outgoing] = deque()  # would exceed what may be under way at once
        self._started = 0
        self._started_bytes = 0
        self._is_finishing = False  # GOODBYE is due after what is queued
        self._is_finished = False

    def __repr__(self) -> str:
        return (
            f"<FrameWriter {self._queued_bytes} bytes queued, {len(self._urgent)} urgent, "
            f"{len(self._ready)} of {len(self._streams)} streams ready>"
        )

    @property
    def queued_bytes(self) -> int:
        """What waits here, with a little for each entry."""
        return self._queued_bytes

    @property
    def has_frames(self) -> bool:
        """Whether `take` would yield something now."""
        return not self._is_finished and bool(self._urgent or self._grants or self._ready or self._may_finish)

    @property
    def _may_finish(self) -> bool:
        return self._is_finishing and not self._queued_bytes

    def finish(self) -> None:
        """Say goodbye after what is queued. Nothing may be pushed any more."""
        self._is_finishing = True

    def push(self, message: Message, body: Buffer = b"") -> None:
        """Queue a message. A large body is referred to, not copied: it must not change until it was sent.

        Raises WireMisuse for what no receiver accepts and LinkFull when too much waits already; nothing is queued then.
        """
        meta = _encode(message)
        meta_bytes, body_bytes = len(meta), body.nbytes if isinstance(body, memoryview) else len(body)
        stream = _message_stream(message)
        if meta_bytes > URGENT_BYTES or body_bytes > URGENT_BYTES:
            self._push_bulk(message, stream, meta, body)
            return
        size_bytes = meta_bytes + body_bytes
        self._reserve(size_bytes, URGENT_RESERVE_BYTES)
        frame = b"".join((HEADER.pack(_MESSAGE, 0, 0, stream, size_bytes, meta_bytes, body_bytes, 0), meta, body))
        outgoing = self._streams.get(stream) if self._streams else None
        if outgoing is None or not outgoing.queue:
            self._urgent.append(frame)
        else:
            outgoing.queue.append(frame)

    def _push_bulk(self, message: Message, stream: int, meta: bytes, body: Buffer) -> None:
        kind = _MESSAGE
        if len(meta) > MAX_META_BYTES:
            kind = _LONG_MESSAGE
            if not isinstance(message, Open | Rewire) or len(meta) > MAX_LONG_META_BYTES:
                raise WireMisuse(
                    f"a message of {len(meta)} bytes of type {type(message).__name__} is longer than any peer accepts"
                )
        view = memoryview(body).cast("B") if body else memoryview(b"")
        if len(view) > MAX_BODY_BYTES:
            raise WireMisuse(f"a body of {len(view)} bytes is longer than the {MAX_BODY_BYTES} that any peer accepts")
        self._reserve(len(meta) + len(view), 0)
        outgoing = self._streams.get(stream)
        if outgoing is None:
            outgoing = self._streams[stream] = _Outgoing(stream)
        outgoing.queue.append(_Bulk(kind, meta, view))
        if len(outgoing.queue) == 1:
            self._schedule(outgoing)

    def _reserve(self, size_bytes: int, reserve_bytes: int) -> None:
        queued_bytes = self._queued_bytes + size_bytes + _QUEUED_OVERHEAD_BYTES
        if queued_bytes > self._max_queued_bytes + reserve_bytes:
            raise LinkFull(f"{self._queued_bytes} bytes wait for the other side already")
        self._queued_bytes = queued_bytes

    def grant(self, stream: int, chunks: int) -> None:
        """Tell the other side that we consumed chunks of its stream. Raises LinkFull when it never listens."""
        if len(self._grants) >= MAX_BUSY_STREAMS:
            raise LinkFull("too many credits wait for the other side")
        self._grants[stream] = self._grants.get(stream, 0) + chunks

    def credit(self, stream: int, chunks: int) -> None:
        """The other side consumed chunks. Raises ProtocolViolation when it credits what was never sent."""
        outgoing = self._streams.get(stream)
        if outgoing is None or chunks > outgoing.uncredited:
            raise ProtocolViolation("credit for chunks that were not sent")
        outgoing.uncredited -= chunks
        if outgoing.queue:
            self._schedule(outgoing)
        elif not outgoing.uncredited:
            del self._streams[stream]

    def take(self, max_bytes: int) -> list[Buffer]:
        """Buffers to write, in order: whole frames, at least one where anything may be sent, no more after max_bytes."""
        taken: list[Buffer] = []
        if not (self._urgent or self._ready or self._grants or self._is_finishing):
            return taken  # nearly always, after a message that left at once
        size_bytes = 0
        while size_bytes < max_bytes and (frame := self.take_frame()):
            taken += frame
            for buffer in frame:
                size_bytes += len(buffer)
        return taken

    def take_frame(self) -> list[Buffer]:
        """The one frame that should leave next, as one or two buffers; nothing when nothing may be sent."""
        if self._is_finished:
            return []
        if self._grants:
            stream, chunks = self._grants.popitem()
            return [HEADER.pack(_CREDIT, 0, 0, stream, 0, 0, 0, chunks)]
        if self._urgent:
            frame = self._urgent.popleft()
            self._queued_bytes -= len(frame) - HEADER_BYTES + _QUEUED_OVERHEAD_BYTES
            return [frame]
        if self._ready:
            return self._take_chunk(self._ready.popleft())
        if self._may_finish:
            self._is_finished = True
            return [HEADER.pack(_GOODBYE, 0, 0, 0, 0, 0, 0, 0)]
        return []

    def _take_chunk(self, outgoing: _Outgoing) -> list[Buffer]:
        bulk = cast(_Bulk, outgoing.queue[0])
        start = bulk.sent_bytes
        frame = bulk.take_chunk(outgoing.number)
        outgoing.uncredited += 1
        outgoing.is_ready = False
        self._queued_bytes -= bulk.sent_bytes - start
        if bulk.sent_bytes == bulk.total_bytes:
            self._finish(outgoing, bulk)
        if outgoing.queue:
            self._schedule(outgoing)
        return frame

    def _finish(self, outgoing: _Outgoing, bulk: _Bulk) -> None:
        self._queued_bytes -= _QUEUED_OVERHEAD_BYTES
        queue = outgoing.queue
        queue.popleft()
        while queue and isinstance(queue[0], bytes):
            self._urgent.append(cast(bytes, queue.popleft()))
        if bulk.is_several_frames:
            self._started -= 1
            self._started_bytes -= bulk.total_bytes
            while self._unstarted and self._start(cast(_Bulk, self._unstarted[0].queue[0])):
                self._ready.append(self._unstarted.popleft())

    def _schedule(self, outgoing: _Outgoing) -> None:
        """Put a stream whose first entry is bulk in line, unless it stands there or has no credit."""
        if outgoing.is_ready or outgoing.uncredited >= TENSOR_FLOW_CONTROL_WINDOW:
            return
        outgoing.is_ready = True
        bulk = cast(_Bulk, outgoing.queue[0])
        may_send = bulk.sent_bytes > 0 or not bulk.is_several_frames or self._start(bulk)
        (self._ready if may_send else self._unstarted).append(outgoing)

    def _start(self, bulk: _Bulk) -> bool:
        """Count a message of several frames as under way, if the receiver's limits have room for it."""
        total_bytes = self._started_bytes + bulk.total_bytes
        if self._started >= MAX_HALF_RECEIVED or total_bytes > MAX_HALF_RECEIVED_BYTES:
            return False
        self._started += 1
        self._started_bytes = total_bytes
        return True


# ---------------------------------------------------------------- receiving


class _Incoming:
    """A message that has not arrived whole."""

    __slots__ = ("body_bytes", "data", "kind", "meta_bytes", "stream", "total_bytes")

    def __init__(self, kind: int, stream: int, meta_bytes: int, body_bytes: int) -> None:
        self.kind = kind
        self.stream = stream
        self.meta_bytes = meta_bytes
        self.body_bytes = body_bytes
        self.total_bytes = meta_bytes + body_bytes
        self.data = bytearray()  # grows with what arrives, never with what was announced


class FrameDecoder:
    """Bytes of one connection, cut anywhere, to events. After the first ProtocolViolation it raises for ever."""

    def __init__(self) -> None:
        self._header = b""  # the beginning of a header
        self._current: _Incoming | None = None  # whose frame is being received
        self._frame_left = 0
        self._half_received: dict[int, _Incoming] = {}
        self._half_received_bytes = 0  # when complete
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
            if (
                kind == _MESSAGE
                and payload == meta + body <= end - place
                and meta <= URGENT_BYTES >= body
                and not value
            ):
                # The common case by far, a small message that arrived whole, takes the short way.
                stop = place + meta
                message = self._message(kind, stream, view[place:stop])
                if stream in self._half_received:
                    raise ProtocolViolation("a message inside another one of its stream")
                place = stop + body
                events.append(Received(message, data[stop:place], stream, 0))
                continue
            if kind >= _CREDIT:
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
        if kind == _CREDIT and is_bare and 1 <= value <= TENSOR_FLOW_CONTROL_WINDOW:
            return Credited(stream, value)
        if kind == _GOODBYE and is_bare and not (stream or value):
            self._is_ended = True
            return Ended()
        raise ProtocolViolation("a frame of unknown kind, or a malformed one")

    def _begin_frame(self, kind: int, stream: int, payload: int, meta: int, body: int, value: int) -> None:
        if kind == _CHUNK:
            incoming = self._continued(stream, payload, meta, body, value)
        elif kind in (_MESSAGE, _LONG_MESSAGE):
            incoming = self._started(kind, stream, payload, meta, body, value)
        else:
            raise ProtocolViolation("a frame of unknown kind, or a malformed one")
        self._current = incoming
        self._frame_left = payload

    def _started(self, kind: int, stream: int, payload: int, meta: int, body: int, value: int) -> _Incoming:
        total = meta + body
        if (
            not 1 <= meta <= (MAX_LONG_META_BYTES if kind == _LONG_MESSAGE else MAX_META_BYTES)
            or body > MAX_BODY_BYTES
            or value
        ):
            raise ProtocolViolation("a message larger than allowed")
        if stream in self._half_received:
            raise ProtocolViolation("a message inside another one of its stream")
        if _is_urgent(meta, body):
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
        self._half_received_bytes += total
        if len(self._half_received) >= MAX_HALF_RECEIVED or self._half_received_bytes > MAX_HALF_RECEIVED_BYTES:
            raise ProtocolViolation("too many messages begun and not finished")

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
        chunks = 0 if _is_urgent(incoming.meta_bytes, incoming.body_bytes) else 1
        if len(incoming.data) < incoming.total_bytes:
            self._half_received[incoming.stream] = incoming
            events.append(Progress(incoming.stream, chunks))
            return
        if self._half_received.pop(incoming.stream, None) is not None:
            self._half_received_bytes -= incoming.total_bytes
        with memoryview(incoming.data) as view:
            message = self._message(incoming.kind, incoming.stream, view[: incoming.meta_bytes])
            body = bytes(view[incoming.meta_bytes :])
        events.append(Received(message, body, incoming.stream, chunks))

    def _message(self, kind: int, stream: int, meta: memoryview) -> Message:
        try:
            message = _decode(meta)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # Without the decoder's text: it may quote what was received.
            raise ProtocolViolation("a message that is none of ours, or with values out of range") from error
        if _message_stream(message) != stream:
            raise ProtocolViolation("a message on a stream that is not its session's")
        if kind == _LONG_MESSAGE and not isinstance(message, Open | Rewire):
            raise ProtocolViolation("a long message of a type that is never long")
        return message
