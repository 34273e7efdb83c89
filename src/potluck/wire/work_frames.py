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
        self._buffer = bytearray()

    def __repr__(self) -> str:
        return f"<WorkDecoder with {len(self._buffer)} bytes of an unfinished frame>"

    def feed(self, data: bytes) -> list[tuple[_Kind, bytes]]:
        """Messages that `data` completes, with their bodies."""
        if not self._buffer:  # most often a read holds exactly one frame: do without a copy
            frames, used = self._cut(data)
            self._buffer += data[used:] if used else data
            return frames
        self._buffer += data
        frames, used = self._cut(self._buffer)
        del self._buffer[:used]
        return frames

    def _cut(self, data: bytes | bytearray) -> tuple[list[tuple[_Kind, bytes]], int]:
        frames: list[tuple[_Kind, bytes]] = []
        start = 0
        with memoryview(data) as view:
            while len(view) - start >= _HEADER.size:
                message_bytes, body_bytes = _HEADER.unpack_from(view, start)
                if message_bytes > MAX_MESSAGE_BYTES or body_bytes > MAX_BODY_BYTES:
                    raise ProtocolViolation(
                        f"a frame announces {message_bytes} + {body_bytes} bytes; that is past the limits"
                    )
                body = start + _HEADER.size + message_bytes
                if len(view) < body + body_bytes:
                    break
                with view[start + _HEADER.size : body] as part:
                    frames.append((self._message(part), bytes(view[body : body + body_bytes])))
                start = body + body_bytes
        return frames, start

    def _message(self, data: memoryview) -> _Kind:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the second for text that is not UTF-8
            raise ProtocolViolation(f"a frame does not hold a message of this protocol: {error}") from None


def to_worker_decoder() -> WorkDecoder[ToWorker]:
    return WorkDecoder(msgspec.msgpack.Decoder(ToWorker))


def from_worker_decoder() -> WorkDecoder[FromWorker]:
    return WorkDecoder(msgspec.msgpack.Decoder(FromWorker))
