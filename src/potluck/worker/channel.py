"""The worker's end of its private stream. Frames are read on a thread of their own, which answers pings by itself.

So a ping is answered while the main thread computes (kernels release the GIL), and the end of the stream ends the process at once.
"""

import queue
import socket
import sys
import threading

from potluck.core.errors import ProtocolViolation
from potluck.wire.work import FromWorker, Ping, Pong, ToWorker
from potluck.wire.work_frames import encode, to_worker_decoder
from potluck.worker.host_process import end

_READ_BYTES = 256 << 10
BROKEN_STREAM = 76  # exit status: what came was not our protocol


class Channel:
    """Messages in the order in which they came. `progress` is the main thread's to raise; pongs report it."""

    def __init__(self, stream: socket.socket) -> None:
        self.progress = 0
        self._stream = stream
        self._sending = threading.Lock()
        self._arrived: queue.SimpleQueue[tuple[ToWorker, bytes]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="potluck-channel", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Channel with {self._arrived.qsize()} messages waiting>"

    def receive(self) -> tuple[ToWorker, bytes]:
        """Waits for the next message; there is always one, because the end of the stream is the end of the process."""
        return self._arrived.get()

    def send(self, message: FromWorker, *parts: bytes | memoryview) -> None:
        buffers = encode(message, *parts)
        with self._sending:
            sent = self._stream.sendmsg(buffers)
            for buffer in buffers:  # a large body does not fit into the socket at once
                if sent < len(buffer):
                    self._stream.sendall(memoryview(buffer)[sent:])
                sent = max(0, sent - len(buffer))

    def _read(self) -> None:
        decoder = to_worker_decoder()
        try:
            while data := self._stream.recv(_READ_BYTES):
                for message, body in decoder.feed(data):
                    if isinstance(message, Ping):
                        self.send(Pong(message.nonce, self.progress))
                    else:
                        self._arrived.put((message, body))
        except ProtocolViolation as error:
            print(f"worker: the daemon's stream is broken: {error}", file=sys.stderr)
            end(BROKEN_STREAM)
        except OSError:
            pass  # the daemon is gone; there is nobody to tell
        end(0)
