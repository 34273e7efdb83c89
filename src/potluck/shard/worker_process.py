"""A worker process as the daemon sees it: started, spoken to, watched, ended. Knows the worker by its module's name only.

Callbacks are plain functions, called on the loop. The daemon imports nothing of the engine through this module.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from potluck.core.errors import ProtocolViolation
from potluck.core.processors import LOOP_CORE
from potluck.net.sockets import write_together
from potluck.shard.memory_limit import has_run_out_of_memory
from potluck.wire.work import FromWorker, Load, Loaded, LoadFailed, OpenSession, RunBatch, ToWorker
from potluck.wire.work_frames import Buffer, encode, from_worker_decoder
from potluck.wire.worker_settings import WorkerSettings

OnMessage = Callable[[FromWorker, bytes], None]
OnLost = Callable[[str], None]

PING_INTERVAL_S = 0.1
_FRESH_S = 0.05  # a sign of life younger than this is not asked for again
FROZEN_AFTER_S = 30.0  # pings without an answer for so long, and the worker will not come back by itself
_STUCK_AFTER_S = (
    1800.0  # alive and without any result: the longest chunk on the slowest machine takes a quarter of an hour
)
_MOST_FRUITLESS = round(_STUCK_AFTER_S / PING_INTERVAL_S)
_END_GRACE_S = 1.0  # after its stream has closed, a worker has this long to be gone
_LOOK_S = 0.005
_LOG = logging.getLogger(__name__)
_MODULE = "potluck.worker.process"
_KERNEL_COUNTERS = Path("/proc/vmstat")
# A worker finds its interpreter, its caches and temporary files by these; whatever else the daemon was given stays with it.
_ENVIRONMENT = (
    "PATH", "HOME", "USERPROFILE", "LOCALAPPDATA", "SYSTEMROOT", "LANG", "LC_ALL", "TMPDIR", "TEMP", "LD_LIBRARY_PATH",
    "PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_DATA_HOME", "POTLUCK_HOME", "POTLUCK_CACHE",
    "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "TRITON_CACHE_DIR",
)  # fmt: skip


def worker_environment(daemon: Mapping[str, str] = os.environ) -> dict[str, str]:
    kept = {name: daemon[name] for name in _ENVIRONMENT if name in daemon}
    # The engine has its own threads; numpy's would only be started and sleep.
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def host_memory_kills() -> int | None:
    """How many processes this system has ended for lack of memory since it started; None where it does not say."""
    try:
        lines = _KERNEL_COUNTERS.read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _spawn(settings: WorkerSettings, stream: socket.socket, pulse: socket.socket) -> "subprocess.Popen[bytes]":
    fds = stream.fileno(), pulse.fileno()
    names = ["--fd", str(fds[0]), "--pulse-fd", str(fds[1])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, *names, "--settings", settings.encode()],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # stderr is the daemon's: tracebacks go to its log
        env=worker_environment(),
    )


def _socket_pairs() -> tuple[tuple[socket.socket, socket.socket], tuple[socket.socket, socket.socket]]:
    """For messages and for the pulse: our end and theirs."""
    messages = socket.socketpair()
    try:
        return messages, socket.socketpair()
    except OSError:
        for end in messages:
            end.close()
        raise


class _Pulse(asyncio.Protocol):
    """The stream on which a thread of the worker gives back what it is sent, also while another one computes."""

    def __init__(self, on_sign_of_life: Callable[[], None]) -> None:
        self._on_sign_of_life = on_sign_of_life
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._on_sign_of_life()

    def ask(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"?")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class WorkerProcess(asyncio.Protocol):
    """One process and its stream. `on_lost` is called once, unless `stop` came first; nothing is called after it.

    `last_sign_of_life` is on the loop's clock. While answers are owed it is kept fresh by pings; silence before that means nothing.
    """

    def __init__(self, on_message: OnMessage, on_lost: OnLost, patience_s: float = FROZEN_AFTER_S) -> None:
        """Use `start`."""
        self._most_unanswered = max(1, round(patience_s / PING_INTERVAL_S))
        self._unanswered = 0  # pings in a row; counted, not timed, because the daemon may have been stopped itself
        self._fruitless = 0  # pings since it last gave an answer that was owed
        self._is_loading = False
        self._on_message = on_message
        self._on_lost: OnLost | None = on_lost
        self._loop = asyncio.get_running_loop()
        self._decoder = from_worker_decoder()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_own_kill = False
        self._kills_before = host_memory_kills()
        self._answers_owed = 0
        self._pulse = _Pulse(self._on_sign_of_life)
        self._ping_timer: asyncio.TimerHandle | None = None
        self._reap_timer: asyncio.TimerHandle | None = None
        self._ended = self._loop.create_future()
        self.last_sign_of_life = self._loop.time()
        self.has_spoken = False  # until then it is starting up, and its silence means nothing

    @classmethod
    async def start(
        cls, settings: WorkerSettings, on_message: OnMessage, on_lost: OnLost, patience_s: float = FROZEN_AFTER_S
    ) -> "WorkerProcess":
        """Returns once the process exists; what is sent now waits in the socket until it has started up.

        To be called on the thread that lives as long as the worker should: Linux ends a worker with its starter's thread.
        One that owes an answer and gives no sign of life for `patience_s` is ended by force.
        """
        worker = cls(on_message, on_lost, patience_s)
        (ours, theirs), (our_pulse, their_pulse) = _socket_pairs()
        try:
            with theirs, their_pulse, LOOP_CORE.suspended():
                worker._process = _spawn(settings, theirs, their_pulse)
            for stream in (ours, our_pulse):
                stream.setblocking(False)
            await worker._loop.create_connection(lambda: worker._pulse, sock=our_pulse)
            await worker._loop.create_connection(lambda: worker, sock=ours)
        except BaseException:
            worker._pulse.close()
            our_pulse.close()
            ours.close()
            worker.kill()
            worker._reap(0.0)
            raise
        return worker

    def __repr__(self) -> str:
        state = "ended" if self._ended.done() else "connected" if self.is_connected else "ending"
        return f"<WorkerProcess {self.pid} {state}, {self._answers_owed} answers owed>"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_busy(self) -> bool:
        """Whether it owes an answer, so that its silence means something."""
        return self._answers_owed > 0

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return None if self._process is None else self._process.returncode

    @property
    def has_run_out_of_memory(self) -> bool:
        """Once it is gone: whether that was for lack of memory, as it or the system says."""
        kills = host_memory_kills()
        meanwhile = None if kills is None or self._kills_before is None else kills - self._kills_before
        return has_run_out_of_memory(self.exit_status, is_own_kill=self._is_own_kill, host_kills=meanwhile)

    def send(self, message: ToWorker, *parts: bytes | memoryview) -> None:
        """Dropped where the worker is gone: `on_lost` says so, or has said so."""
        if self._transport is None or self._transport.is_closing():
            return
        write_together(self._transport, encode(message, *parts))
        if isinstance(message, RunBatch | Load | OpenSession):
            self._is_loading = self._is_loading or isinstance(message, Load)
            self._expect_answer()

    def send_batch(self, start: Buffer, body: bytes) -> bool:
        """A RunBatch of which all but the body was encoded beforehand. False: the worker is gone, and nothing was sent."""
        if self._transport is None or self._transport.is_closing():
            return False
        write_together(self._transport, (start, body))
        self._expect_answer()
        return True

    def _expect_answer(self) -> None:
        if self._answers_owed == 0:
            self.last_sign_of_life = self._loop.time()
        self._answers_owed += 1
        if self._ping_timer is None:
            self._unanswered = self._fruitless = 0
            self._ping_timer = self._loop.call_later(PING_INTERVAL_S, self._ping_if_busy)

    def ping(self) -> None:
        """Asks for a sign of life; the answer shows in `last_sign_of_life`."""
        self._pulse.ask()

    def kill(self) -> None:
        """Ends it however it is: computing, stopped or deaf. `on_lost` follows."""
        if self._process is not None and self._process.poll() is None:
            self._is_own_kill = True
            self._process.kill()

    def abandon(self, reason: str) -> None:
        """Ends it, and `on_lost` is told before this returns; nothing that it has said meanwhile is heard any more."""
        self.kill()
        self._lose(reason)

    async def stop(self) -> None:
        """Ends it and waits until it is gone. `on_lost` is not called any more."""
        self._on_lost = None
        self._close()
        await asyncio.shield(self._ended)

    async def gone(self, patience_s: float) -> None:
        """Waits until it is gone and `exit_status` is known, for so long at most."""
        await asyncio.wait({self._ended}, timeout=patience_s)

    # ------------------------------------------------------------ the stream's events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def data_received(self, data: bytes) -> None:
        self._on_sign_of_life()
        try:
            frames = self._decoder.feed(data)
        except ProtocolViolation as error:
            self._lose(f"the worker's stream is broken: {error}")
            self.kill()
            return
        for message, body in frames:
            self._fruitless = 0
            self._is_loading = self._is_loading and not isinstance(message, Loaded | LoadFailed)
            if self._answers_owed:
                self._answers_owed -= 1
            if self._on_lost is not None:
                self._on_message(message, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose("the worker process ended" if error is None else f"the worker's stream broke: {error}")

    def _on_sign_of_life(self) -> None:
        self.last_sign_of_life = self._loop.time()
        self.has_spoken = True
        self._unanswered = 0

    def _ping_if_busy(self) -> None:
        """Only one that is silent: whoever answers every few milliseconds is not to be woken for this as well."""
        self._ping_timer = None
        if self._answers_owed > 0 and self.is_connected:
            silent_s = self._loop.time() - self.last_sign_of_life
            if silent_s < _FRESH_S:
                self._ping_timer = self._loop.call_later(PING_INTERVAL_S - silent_s, self._ping_if_busy)
                return
            if self._unanswered >= self._most_unanswered:
                _LOG.warning("worker %d gives no sign of life; ending it", self.pid)
                self.kill()
                return
            if self._fruitless >= _MOST_FRUITLESS and not self._is_loading:
                # A thread beside the computing one answers pings: a device or a disk that never comes back does not stop it.
                _LOG.warning(
                    "worker %d lives and has not finished anything for %d s; ending it", self.pid, _STUCK_AFTER_S
                )
                self.kill()
                return
            self._unanswered += 1
            self._fruitless += 1
            self.ping()
            self._ping_timer = self._loop.call_later(PING_INTERVAL_S, self._ping_if_busy)

    # ------------------------------------------------------------ the end

    def _lose(self, reason: str) -> None:
        on_lost, self._on_lost = self._on_lost, None
        self._close()
        if on_lost is not None:
            on_lost(reason)

    def _close(self) -> None:
        """Our end closed, the worker ends by itself; `_reap` sees to it that it does."""
        self._pulse.close()
        if self._transport is not None:
            self._transport.abort()
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None
        if self._reap_timer is None and not self._ended.done():
            self._reap(self._loop.time() + _END_GRACE_S)

    def _reap(self, deadline: float) -> None:
        """Looks until the process is gone, with force once the deadline is over: no zombie and no orphan is left."""
        self._reap_timer = None
        status = None if self._process is None else self._process.poll()
        if status is not None or self._process is None:
            _LOG.info("worker %d ended with status %s", self.pid, status)
            self._ended.set_result(None)
            return
        if self._loop.time() >= deadline:
            self.kill()
        self._reap_timer = self._loop.call_later(_LOOK_S, self._reap, deadline)
