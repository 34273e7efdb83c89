"""Frames on the private stream between a daemon and its worker: a fixed header, a message, a raw body. No I/O.

Both ends are ours, so a frame that does not fit means that the other side is broken: there is no way back into step.
"""

import struct
from typing import Generic, TypeVar

import msgspec

from potluck.core.errors import ProtocolViolation, WireMisuse
from potluck.wire.work import FromWorker, ToWorker

MAX_MESSAGE_BYTES = 16 << 20  # a sampler's history is the longest thing in a message
MAX_BODY_BYTES = 256 << 20

Buffer = bytes | bytearray | memoryview

_HEADER = struct.Struct("<II")  # bytes of the message, bytes of the body
_ENCODER = msgspec.msgpack.Encoder()
_Kind = TypeVar("_Kind", bound=ToWorker | FromWorker)  # one of the two


def encode(message: ToWorker | FromWorker, *parts: bytes | memoryview) -> list[Buffer]:
    """What to write, one after the other. `parts` (byte-sized items) make up the body and are not copied."""
    body_bytes = 0
    for part in parts:
        body_bytes += len(part)
    if body_bytes > MAX_BODY_BYTES:
        raise WireMisuse(f"a body of {body_bytes} bytes is more than a worker's {MAX_BODY_BYTES}")
    return [frame_start(message, body_bytes), *parts]


def frame_start(message: ToWorker | FromWorker, body_bytes: int) -> bytearray:
    """All that comes before the body."""
    start = bytearray(_HEADER.size)
    _ENCODER.encode_into(message, start, _HEADER.size)
    _HEADER.pack_into(start, 0, len(start) - _HEADER.size, body_bytes)
    return start


class WorkDecoder(Generic[_Kind]):
    """Takes bytes as they come and gives whole messages. After it has raised ProtocolViolation it must not be used again."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_Kind]) -> None:
        self._decoder = decoder
        self._unfinished = bytearray()
        self._expected: tuple[bytes, int, _Kind] | None = None  # how it begins, how long it is
        self._wanted = 0  # bytes that the unfinished frame has when it is complete, as far as is known

    def __repr__(self) -> str:
        return f"<WorkDecoder with {len(self._unfinished)} bytes of an unfinished frame>"

    def expect(self, message: _Kind, body_bytes: int) -> None:
        """Most likely this is what will come, with a body of that length: where just that does, there is nothing to decode."""
        start = bytes(frame_start(message, body_bytes))
        self._expected = start, len(start) + body_bytes, message

    def feed(self, data: bytes) -> list[tuple[_Kind, bytes]]:
        """Messages that `data` completes, with their bodies."""
        if self._expected is not None:
            begin, frame_bytes, expected = self._expected
            if len(data) == frame_bytes and not self._unfinished and data.startswith(begin):
                self._expected = None
                return [(expected, data[len(begin) :])]
        if self._unfinished:  # most often there is nothing: a read holds exactly one frame
            self._unfinished += data
            if len(self._unfinished) < self._wanted:
                return []
            data = bytes(self._unfinished)
            self._unfinished.clear()
        frames: list[tuple[_Kind, bytes]] = []
        start, length = 0, len(data)
        while start < length:
            middle = stop = start + _HEADER.size  # of half a header no more is known
            if stop <= length:
                message_bytes, body_bytes = _HEADER.unpack_from(data, start)
                if message_bytes > MAX_MESSAGE_BYTES or body_bytes > MAX_BODY_BYTES:
                    raise ProtocolViolation(f"a frame announces {message_bytes} + {body_bytes} bytes; past the limits")
                middle += message_bytes
                stop = middle + body_bytes
            if stop > length:
                self._unfinished += data[start:]
                self._wanted = stop - start
                break
            try:
                message = self._decoder.decode(data[start + _HEADER.size : middle])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the second for text that is not UTF-8
                raise ProtocolViolation(f"a frame does not hold a message of this protocol: {error}") from None
            frames.append((message, data[middle:stop]))
            start = stop
        return frames


def to_worker_decoder() -> WorkDecoder[ToWorker]:
    return WorkDecoder(msgspec.msgpack.Decoder(ToWorker))


def from_worker_decoder() -> WorkDecoder[FromWorker]:
    return WorkDecoder(msgspec.msgpack.Decoder(FromWorker))
