"""The worker's end of its private stream, read by the thread that computes: waking another one for every step would cost more.

Whether the process lives is asked and answered elsewhere (`pulse.py`).
"""

import math
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

from potluck.core.errors import ProtocolViolation
from potluck.core.looking import Pace
from potluck.core.processors import CROWD, are_few
from potluck.wire.work import FromWorker, ToWorker
from potluck.wire.work_frames import encode, to_worker_decoder
from potluck.worker.host_process import end

BROKEN_STREAM = 76  # exit status: what came was not our protocol
_READ_BYTES = 256 << 10


def _do_nothing() -> None:
    return


class Channel:
    """Messages in the order in which they came."""

    def __init__(self, stream: socket.socket, spin_s: float = 0.0) -> None:
        self._spin_s, self._awake_until_s = spin_s, 0.0
        self._pace = Pace(0.0)
        self._idle_at_s = math.inf
        self._when_idle: Callable[[], object] = _do_nothing
        self._stream = stream
        self._decoder = to_worker_decoder()
        self._arrived: deque[tuple[ToWorker, bytes]] = deque()

    def __repr__(self) -> str:
        return f"<Channel with {len(self._arrived)} messages waiting>"

    def receive(self) -> tuple[ToWorker, bytes]:
        """Waits for the next message; there is always one, because the end of the stream is the end of the process."""
        if not self._arrived:
            self._wait()
        return self._arrived.popleft()

    def look_for(self, look_s: float) -> None:
        """From now on the next message is looked for so long before it is slept for, unless the last one took longer. 0: no more."""
        self._pace = Pace(look_s)
        CROWD.is_heeded = look_s > 0

    def _wait(self) -> None:
        self._pace.begin(time.monotonic())
        while not self._arrived:
            self._spin()
            self._read()
        self._pace.end(time.monotonic())

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
        if self._spin_s or (self._pace.is_soon and not CROWD.is_there):
            self.stay_awake(self._spin_s or self._pace.soon_s)
        while (now_s := time.monotonic()) < self._awake_until_s and not self._is_readable():
            if now_s >= self._idle_at_s:
                self._idle_at_s = math.inf
                self._when_idle()
            self._give_way()  # to those who are about to send it, where they want this core

    def give_way_where_few(self) -> None:
        """To the daemon, which has just been sent something."""
        if are_few() and not CROWD.is_there:
            self._give_way()

    def _give_way(self) -> None:
        """Another worker may have its turn meanwhile: it is done before there is anything to do here."""
        CROWD.give_way(self._is_readable)

    def _is_readable(self) -> bool:
        return bool(select.select([self._stream], [], [], 0)[0])

    def send(self, message: FromWorker, *parts: bytes | memoryview) -> None:
        buffers = encode(message, *parts)
        try:
            sent = self._stream.sendmsg(buffers)
            for buffer in buffers:  # a large body does not fit into the socket at once
                if sent < len(buffer):
                    self._stream.sendall(memoryview(buffer)[sent:])
                sent = max(0, sent - len(buffer))
        except OSError:
            end(0)  # the daemon is gone; there is nobody to tell

    def _read(self) -> None:
        """Takes what is there, or waits for something."""
        try:
            data = self._stream.recv(_READ_BYTES)
            self._arrived.extend(self._decoder.feed(data))
        except ProtocolViolation as error:
            print(f"worker: the daemon's stream is broken: {error}", file=sys.stderr)
            end(BROKEN_STREAM)
        except OSError:  # what a killed daemon's end may look like
            end(0)
        if not data:
            end(0)
