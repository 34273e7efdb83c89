"""The worker's end of its private stream. Pings are answered and the stream's end is noticed even while the worker computes.

The main thread reads the stream itself, because waking another thread for every step would cost more than the reading; a second
thread looks at the stream from time to time while the main thread is busy elsewhere (kernels release the GIL).
"""

import math
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from potluck.core.errors import ProtocolViolation
from potluck.core.processors import give_way
from potluck.wire.work import FromWorker, Ping, Pong, ToWorker
from potluck.wire.work_frames import encode, to_worker_decoder
from potluck.worker.host_process import end

BROKEN_STREAM = 76  # exit status: what came was not our protocol
_READ_BYTES = 256 << 10
_LOOK_S, _IDLE_LOOK_S, _IDLE_AFTER_S = 0.02, 0.2, 2.0


def _do_nothing() -> None:
    return


class Channel:
    """Messages in the order in which they came. `progress` is the main thread's to raise; pongs report it."""

    def __init__(self, stream: socket.socket, spin_s: float = 0.0) -> None:
        self.progress = 0
        self._spin_s, self._awake_until_s = spin_s, 0.0
        self._idle_at_s = math.inf
        self._when_idle: Callable[[], object] = _do_nothing
        self._stream = stream
        self._decoder = to_worker_decoder()
        self._arrived: deque[tuple[ToWorker, bytes]] = deque()
        self._reading, self._sending = threading.Lock(), threading.Lock()
        self._last_read = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="potluck-channel", daemon=True)
        self._watcher.start()

    def __repr__(self) -> str:
        return f"<Channel with {len(self._arrived)} messages waiting>"

    def receive(self) -> tuple[ToWorker, bytes]:
        """Waits for the next message; there is always one, because the end of the stream is the end of the process."""
        while not self._arrived:
            with self._reading:
                if not self._arrived:
                    self._spin()
                    self._read()
        return self._arrived.popleft()

    def expect(self, message: ToWorker, body_bytes: int) -> None:
        """What is most likely to come next. It comes as it would without; only sooner."""
        self._decoder.expect(message, body_bytes)

    @property
    def has_more(self) -> bool:
        """Whether something waits to be received, or to be read."""
        return bool(self._arrived) or self._is_readable()

    def stay_awake(self, seconds: float) -> None:
        """The next message is likely to come within `seconds`."""
        self._awake_until_s = time.monotonic() + seconds

    def call_when_idle(self, after_s: float, action: Callable[[], object]) -> None:
        """`receive` calls `action`, once, where it looks for a message and none has come `after_s` from now; not where it sleeps."""
        self._idle_at_s, self._when_idle = time.monotonic() + after_s, action

    def _spin(self) -> None:
        """Looks for a message without sleeping, where the next is likely to come soon: see net/spinning.py."""
        if self._spin_s:
            self.stay_awake(self._spin_s)
        while (now_s := time.monotonic()) < self._awake_until_s and not self._is_readable():
            if now_s >= self._idle_at_s:
                self._idle_at_s = math.inf
                self._when_idle()
            give_way()  # to those who are about to send it, where they want this core

    def _is_readable(self) -> bool:
        return bool(select.select([self._stream], [], [], 0)[0])

    def send(self, message: FromWorker, *parts: bytes | memoryview) -> None:
        buffers = encode(message, *parts)
        with self._sending:
            try:
                sent = self._stream.sendmsg(buffers)
                for buffer in buffers:  # a large body does not fit into the socket at once
                    if sent < len(buffer):
                        self._stream.sendall(memoryview(buffer)[sent:])
                    sent = max(0, sent - len(buffer))
            except OSError:
                end(0)  # the daemon is gone; there is nobody to tell

    def _read(self) -> None:
        """Takes what is there, or waits for something. Called by whoever holds `_reading`."""
        try:
            data = self._stream.recv(_READ_BYTES)
            frames = self._decoder.feed(data)
        except ProtocolViolation as error:
            print(f"worker: the daemon's stream is broken: {error}", file=sys.stderr)
            end(BROKEN_STREAM)
        except OSError:  # what a killed daemon's end may look like
            end(0)
        if not data:
            end(0)
        self._last_read = time.monotonic()
        for message, body in frames:
            if isinstance(message, Ping):
                self.send(Pong(message.nonce, self.progress))
            else:
                self._arrived.append((message, body))

    def _watch(self) -> None:
        while True:
            is_idle = time.monotonic() - self._last_read > _IDLE_AFTER_S
            time.sleep(_IDLE_LOOK_S if is_idle else _LOOK_S)
            # Where the main thread waits for the stream it holds the lock, and needs no help.
            if self._reading.acquire(blocking=False):
                try:
                    if self._is_readable():
                        self._read()
                finally:
                    self._reading.release()
