"""Messages to frames: what is urgent at once, bulk in chunks on credit, stream by stream in turn. No I/O."""

from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from potluck.core.errors import LinkFull, ProtocolViolation, WireMisuse
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
    MAX_QUEUED_BYTES,
    MESSAGE,
    URGENT_BYTES,
    URGENT_RESERVE_BYTES,
    Buffer,
    message_stream,
    small_message_header,
)
from potluck.wire.messages import Message, Open, Rewire

_QUEUED_OVERHEAD_BYTES = 256  # what an entry costs beside its bytes

_encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


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
            header = HEADER.pack(CHUNK, 0, 0, stream, stop - start, 0, 0, start)
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
        stream = message_stream(message)
        if meta_bytes > URGENT_BYTES or body_bytes > URGENT_BYTES:
            self._push_bulk(message, stream, meta, body)
            return
        self.push_frame(stream, b"".join((small_message_header(stream, meta_bytes, body_bytes), meta, body)))

    def push_frame(self, stream: int, frame: bytes) -> None:
        """Queue a small message that is a frame already. Raises LinkFull."""
        self._reserve(len(frame) - HEADER_BYTES, URGENT_RESERVE_BYTES)
        outgoing = self._streams.get(stream) if self._streams else None
        if outgoing is None or not outgoing.queue:
            self._urgent.append(frame)
        else:
            outgoing.queue.append(frame)

    def _push_bulk(self, message: Message, stream: int, meta: bytes, body: Buffer) -> None:
        kind = MESSAGE
        if len(meta) > MAX_META_BYTES:
            kind = LONG_MESSAGE
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
        if not (self._ready or self._grants or self._is_finishing):
            if not self._urgent:
                return []
            if len(self._urgent) == 1:  # nearly always: a message that leaves at once
                return [self._take_urgent()]
        taken: list[Buffer] = []
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
            return [HEADER.pack(CREDIT, 0, 0, stream, 0, 0, 0, chunks)]
        if self._urgent:
            return [self._take_urgent()]
        if self._ready:
            return self._take_chunk(self._ready.popleft())
        if self._may_finish:
            self._is_finished = True
            return [HEADER.pack(GOODBYE, 0, 0, 0, 0, 0, 0, 0)]
        return []

    def _take_urgent(self) -> bytes:
        frame = self._urgent.popleft()
        self._queued_bytes -= len(frame) - HEADER_BYTES + _QUEUED_OVERHEAD_BYTES
        return frame

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
