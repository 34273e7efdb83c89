"""A step that is about to be sent or to arrive, of which only the body and the times are not known yet: its frame, made beforehand. No I/O.

While one answer is on its way, what comes next is known to everybody but for the numbers in it. Whoever has the frame ready needs
neither to encode it when its body is there, nor to decode it before its body can go on (docs/hop.md).
"""

from collections.abc import Callable

import msgspec

from potluck.core.errors import WireMisuse
from potluck.wire.frames import URGENT_BYTES, message_stream, small_message_header
from potluck.wire.messages import Message, Step
from potluck.wire.spent import SPENT_BYTES

_encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


class ForeseenStep:
    """The frame of `step`, whatever it says of times, which come from `stages` shards, and with a body of `body_bytes`."""

    def __init__(self, step: Step, stages: int, body_bytes: int) -> None:
        """Raises WireMisuse for a step that would not travel as one frame."""
        if body_bytes > URGENT_BYTES:
            raise WireMisuse(f"a step with {body_bytes} bytes does not travel as one frame")
        spent_bytes = stages * SPENT_BYTES
        meta = _encode(msgspec.structs.replace(step, spent=bytes(spent_bytes)))  # the times are the last of it
        self.stream = message_stream(step)
        self._start = small_message_header(self.stream, len(meta), body_bytes) + meta[: len(meta) - spent_bytes]
        self._spent_bytes, self._body_bytes = spent_bytes, body_bytes
        self._body_at = len(self._start) + spent_bytes
        self._frame_bytes = self._body_at + body_bytes

    def __repr__(self) -> str:
        return f"<ForeseenStep of {self._frame_bytes} bytes on stream {self.stream}>"

    def frame(self, spent: bytes, body: bytes) -> bytes:
        """What is to be sent. Raises WireMisuse where times or body are of another length than was foreseen."""
        if len(spent) != self._spent_bytes or len(body) != self._body_bytes:
            raise WireMisuse(f"{len(spent)} bytes of times and {len(body)} of a body are not what was foreseen")
        return b"".join((self._start, spent, body))

    def body_in(self, data: bytes) -> bytes | None:
        """The body, where `data` is exactly this frame; None where it is anything else, less or more."""
        if len(data) == self._frame_bytes and data.startswith(self._start):
            return data[self._body_at :]
        return None
