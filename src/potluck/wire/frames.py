"""Messages to frames and back: fixed binary headers, chunks, credits, priorities. No I/O; does not know what messages mean.

A message is its msgpack form (`meta`) followed by its body. Together they travel in frames of at most TENSOR_CHUNK_BYTES, on the
stream of their session (the first four bytes of its id; 0 without a session). Small messages travel whole and overtake the bulk of
other streams; bulk is sent on credit. Within a stream order is kept. Limits are checked on the header, before memory is taken, and
those of the message's own type as soon as the meta is there.
"""

import enum
import struct

import msgspec

from potluck.wire.messages import Message, Step

URGENT_BYTES = 64 << 10  # meta and body up to this size each: one frame, no credit needed, overtakes bulk
MAX_META_BYTES = 256 << 10
MAX_LONG_META_BYTES = 8 << 20  # Open and Rewire, which carry a session's tokens
MAX_BODY_BYTES = Step.most_body_bytes  # no type has larger ones
MAX_HALF_RECEIVED = 64  # messages of several frames under way in one direction …
MAX_HALF_RECEIVED_BYTES = 512 << 20  # … and what they come to when complete
MAX_BUSY_STREAMS = 1 << 16  # streams with chunks that were not credited yet
MAX_QUEUED_BYTES = 320 << 20
URGENT_RESERVE_BYTES = 4 << 20  # room beyond that for small messages, so that a full queue can still be told to stop

# kind, flags, reserved, stream, payload in this frame, meta and body of the whole message, value
HEADER = struct.Struct("<BBHIIIII")
HEADER_BYTES = HEADER.size

Buffer = bytes | memoryview


class Kind(enum.IntEnum):
    MESSAGE = 1  # the first frame of a message; its payload starts with meta
    LONG_MESSAGE = 2  # the same for Open and Rewire with a long meta
    CHUNK = 3  # the stream's message goes on; value: offset of the payload within it
    CREDIT = 4  # no payload; value: how many chunks of this stream were consumed
    GOODBYE = 5  # nothing follows; without it whoever closes might cut off what the other side has not read yet


# Plain numbers, because looking up an enum's member takes longer than the rest of the comparison.
MESSAGE, LONG_MESSAGE, CHUNK, CREDIT, GOODBYE = (int(kind) for kind in Kind)


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


def message_stream(message: Message) -> int:
    return int.from_bytes(getattr(message, "session", b"")[:4], "little")


def small_message_header(stream: int, meta_bytes: int, body_bytes: int) -> bytes:
    """Of a message that travels whole, in one frame."""
    return HEADER.pack(MESSAGE, 0, 0, stream, meta_bytes + body_bytes, meta_bytes, body_bytes, 0)


def is_urgent(meta_bytes: int, body_bytes: int) -> bool:
    return meta_bytes <= URGENT_BYTES and body_bytes <= URGENT_BYTES
