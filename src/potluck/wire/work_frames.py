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
_Kind = TypeVar("_Kind")  # ToWorker or FromWorker


def encode(message: ToWorker | FromWorker, *parts: bytes | memoryview) -> list[Buffer]:
    """What to write, one after the other. `parts` (byte-sized items) make up the body and are not copied."""
    body_bytes = sum(map(len, parts))
    if body_bytes > MAX_BODY_BYTES:
        raise WireMisuse(f"a body of {body_bytes} bytes is more than a worker's {MAX_BODY_BYTES}")
    head = bytearray(_HEADER.size)
    _ENCODER.encode_into(message, head, _HEADER.size)
    _HEADER.pack_into(head, 0, len(head) - _HEADER.size, body_bytes)
    return [head, *parts]


class WorkDecoder(Generic[_Kind]):
    """Takes bytes as they come and gives whole messages. After it has raised ProtocolViolation it must not be used again."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_Kind]) -> None:
        self._decoder = decoder
        self._unfinished = bytearray()
        self._wanted = 0  # bytes that the unfinished frame has when it is complete, as far as is known

    def __repr__(self) -> str:
        return f"<WorkDecoder with {len(self._unfinished)} bytes of an unfinished frame>"

    def feed(self, data: bytes) -> list[tuple[_Kind, bytes]]:
        """Messages that `data` completes, with their bodies."""
        if self._unfinished:  # most often there is nothing: a read holds exactly one frame
            self._unfinished += data
            if len(self._unfinished) < self._wanted:
                return []
            data = bytes(self._unfinished)
            self._unfinished.clear()
        frames: list[tuple[_Kind, bytes]] = []
        start, length = 0, len(data)
        while start < length:
            body, stop = self._bounds(data, start)
            if stop > length:
                self._unfinished += data[start:]
                self._wanted = stop - start
                break
            frames.append((self._message(data[start + _HEADER.size : body]), data[body:stop]))
            start = stop
        return frames

    def _bounds(self, data: bytes, start: int) -> tuple[int, int]:
        """Where the body of the frame at `start` begins and ends; with half a header, past the end of what is there."""
        after_header = start + _HEADER.size
        if len(data) < after_header:
            return after_header, after_header
        message_bytes, body_bytes = _HEADER.unpack_from(data, start)
        if message_bytes > MAX_MESSAGE_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ProtocolViolation(f"a frame announces {message_bytes} + {body_bytes} bytes; that is past the limits")
        return after_header + message_bytes, after_header + message_bytes + body_bytes

    def _message(self, data: bytes) -> _Kind:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the second for text that is not UTF-8
            raise ProtocolViolation(f"a frame does not hold a message of this protocol: {error}") from None


def to_worker_decoder() -> WorkDecoder[ToWorker]:
    return WorkDecoder(msgspec.msgpack.Decoder(ToWorker))


def from_worker_decoder() -> WorkDecoder[FromWorker]:
    return WorkDecoder(msgspec.msgpack.Decoder(FromWorker))
