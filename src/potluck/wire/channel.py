"""Both directions of one connection after its handshake: frames in and out, and whose chunks are credited when. No I/O.

Chunks are granted to the sender as soon as they were consumed, except on streams that the receiver holds.
"""

from potluck.wire.frame_decoder import FrameDecoder, HalfReceived
from potluck.wire.frame_writer import FrameWriter
from potluck.wire.frames import MAX_QUEUED_BYTES, Buffer, Credited, Progress, Received, stream_of
from potluck.wire.messages import Message


class Channel:
    """Joins a FrameWriter and a FrameDecoder. The owner of the connection moves bytes; `writer.take` says which."""

    def __init__(self, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.writer = FrameWriter(max_queued_bytes)
        self._decoder = FrameDecoder()
        self._held: dict[int, int] = {}  # stream: chunks consumed and not granted
        self.is_ended = False  # the other side said goodbye
        self.received_bytes = 0  # looked at, whatever became of them

    def __repr__(self) -> str:
        return f"<Channel {self.writer!r} {self._decoder!r}, {len(self._held)} streams held>"

    def send(self, message: Message, body: Buffer = b"") -> None:
        self.writer.push(message, body)

    def receive(self, data: bytes) -> list[Received]:
        """Messages that are complete now; call `consumed` for each when it was dealt with. Raises ProtocolViolation."""
        received = []
        self.received_bytes += len(data)
        for event in self._decoder.feed(data):
            if type(event) is Received:
                received.append(event)
            elif type(event) is Progress:
                self._grant(event.stream, event.chunks)
            elif type(event) is Credited:
                self.writer.credit(event.stream, event.chunks)
            else:
                self.is_ended = True
        return received

    @property
    def is_between_messages(self) -> bool:
        """Whether what is received next begins a message."""
        return self._decoder.is_between_messages

    def share(self, shared: HalfReceived) -> None:
        """See FrameDecoder.share."""
        self._decoder.share(shared)

    def end(self) -> None:
        """Nothing more is received."""
        self._decoder.end()

    def consumed(self, received: Received) -> None:
        if received.chunks:
            self._grant(received.stream, received.chunks)

    def _grant(self, stream: int, chunks: int) -> None:
        if stream in self._held:
            self._held[stream] += chunks
        else:
            self._decoder.grant(stream, chunks)
            self.writer.grant(stream, chunks)

    def hold(self, session: bytes) -> None:
        """Grant nothing more to a session: its sender stops once the window is used up, and nobody else's does."""
        self._held.setdefault(stream_of(session), 0)

    def release(self, session: bytes) -> None:
        """End a hold and grant what it kept back; nothing happens where there was none."""
        stream = stream_of(session)
        chunks = self._held.pop(stream, 0)
        if chunks:
            self._grant(stream, chunks)
