"""Keeps a model's worker running while any of its stages should be loaded: starts it, starts it again after a death, retires it.

Knows which stages are wanted and nothing of sessions: those died with the worker, and whoever owns them is told. A worker that died for
lack of memory is followed by one that may take less (`memory_limit.py`).
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine

import msgspec

from potluck.shard.memory_limit import MemoryLimit
from potluck.shard.worker_process import FROZEN_AFTER_S, OnLost, OnMessage, WorkerProcess
from potluck.wire.messages import Stage
from potluck.wire.work import FromWorker, Load, Loaded, LoadFailed, ToWorker, Unload
from potluck.wire.work_frames import Buffer
from potluck.wire.worker_settings import WorkerSettings

_GONE_PATIENCE_S = 5.0  # for a worker that has been ended; one that hangs in the kernel may take for ever
_LOG = logging.getLogger(__name__)


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The pause doubles with every quick death in a row: one before anything was loaded, or within `quick_death_s` of that.

    A worker that is silent at work for `frozen_after_s` counts as dead, and is ended.
    """

    first_pause_s: float = 0.2
    longest_pause_s: float = 30.0
    quick_death_s: float = 5.0
    attention_after: int = 3
    frozen_after_s: float = FROZEN_AFTER_S

    def pause_s(self, quick_deaths: int) -> float:
        doublings = min(max(0, quick_deaths - 1), 32)
        return min(self.first_pause_s * 2.0**doublings, self.longest_pause_s)


class WorkerState(enum.Enum):
    """IDLE: nothing is wanted. STARTING: the process is being made. RUNNING: there is one. WAITING: it died; a pause runs."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"


class WorkerSupervisor:
    """Send it messages as if the worker were always there. Load starts it; Unload of the last stage ends it.

    `on_started` comes before anything of a new process; its Loads are sent already. `on_lost` comes for deaths that nobody asked
    for. Messages to a worker that is not running are dropped: their sessions are gone, as `on_lost` has said.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        on_message: OnMessage,
        on_lost: OnLost,
        on_started: Callable[[], None] | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.settings = settings
        self.state = WorkerState.IDLE
        self.quick_deaths = 0
        self.memory_limit = MemoryLimit(settings.kv_budget_bytes)
        self._policy = policy or RestartPolicy()
        self._on_message, self._on_lost, self._on_started = on_message, on_lost, on_started
        self._wanted: dict[Stage, None] = {}  # in the order in which they were asked for
        self._worker: WorkerProcess | None = None
        self._dead: WorkerProcess | None = None  # the last one; how it ended is known a little later than that it did
        self._attempt = 0  # a start that was overtaken by an Unload must not be taken for the present one
        self._loaded_at: float | None = (
            None  # by this worker, the first stage; loading a large one in vain may take minutes
        )
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        attention = ", needs attention" if self.needs_attention else ""
        return f"<WorkerSupervisor {self.state.value} {self.pid}, {len(self._wanted)} stages wanted{attention}>"

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    @property
    def needs_attention(self) -> bool:
        """It keeps dying right after its start; it is still tried, ever more rarely."""
        return self.quick_deaths >= self._policy.attention_after

    @property
    def last_sign_of_life(self) -> float | None:
        """On the loop's clock; None where there is no process."""
        return self._worker.last_sign_of_life if self._worker is not None else None

    @property
    def is_busy(self) -> bool:
        """Whether it is up and owes an answer, so that its silence means something."""
        return self._worker is not None and self._worker.is_busy and self._worker.has_spoken

    def send(self, message: ToWorker, *parts: bytes | memoryview) -> None:
        if isinstance(message, Load):
            self._wanted[message.stage] = None
            if self.state is WorkerState.IDLE:
                self._begin()
                return
        elif isinstance(message, Unload):
            self._wanted.pop(message.stage, None)
            if not self._wanted:
                self._retire()
                return
        if self._worker is not None:
            self._worker.send(message, *parts)

    def send_batch(self, start: Buffer, body: bytes) -> bool:
        """A RunBatch of which all but the body was encoded beforehand; false, and nothing was sent, where there is no worker."""
        return self._worker is not None and self._worker.send_batch(start, body)

    def ping(self) -> None:
        if self._worker is not None:
            self._worker.ping()

    def kill(self) -> None:
        """Ends the process however it is (stopped, deaf); the usual restart follows."""
        if self._worker is not None:
            self._worker.kill()

    def abandon(self, reason: str) -> None:
        """Ends the process as one that was lost, and at once: nothing that it still says is heard. The usual restart follows."""
        if self._worker is not None:
            self._worker.abandon(reason)

    async def stop(self) -> None:
        """Ends everything; on return no process, task or timer of this supervisor is left."""
        self._wanted.clear()
        self._retire()
        self.state = WorkerState.STOPPED
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ------------------------------------------------------------ starting

    def _begin(self) -> None:
        self._timer = None
        self.state = WorkerState.STARTING
        self._attempt += 1
        self._own(self._start(self._attempt))

    async def _learn_from_death(self) -> None:
        """Waits until the last worker's memory is free again and its end is known; usually both are long since."""
        dead, self._dead = self._dead, None
        if dead is None:
            return
        await dead.gone(_GONE_PATIENCE_S)
        if dead.has_run_out_of_memory:
            self.memory_limit = self.memory_limit.after_death()
            mebibytes = self.memory_limit.kv_budget_bytes >> 20
            _LOG.warning("the worker of %s ran out of memory; KV limit now %d MiB", self.settings.model_path, mebibytes)

    async def _start(self, attempt: int) -> None:
        self._loaded_at = None
        await self._learn_from_death()
        if attempt != self._attempt:
            return
        settings = msgspec.structs.replace(self.settings, kv_budget_bytes=self.memory_limit.kv_budget_bytes)
        try:
            worker = await WorkerProcess.start(settings, self._deliver, self._lost, self._policy.frozen_after_s)
        except OSError as error:  # no more processes or file handles to be had
            if attempt == self._attempt:
                self._lost(f"a worker could not be started: {error}")
            return
        if attempt != self._attempt:
            await worker.stop()
            return
        self._worker, self.state = worker, WorkerState.RUNNING
        for stage in self._wanted:
            worker.send(Load(stage))
        if self._on_started is not None:
            self._on_started()

    def _deliver(self, message: FromWorker, body: bytes) -> None:
        if self._loaded_at is None and isinstance(message, Loaded | LoadFailed):
            self._loaded_at = asyncio.get_running_loop().time()
        self._on_message(message, body)

    # ------------------------------------------------------------ ending

    def _lost(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        self._dead, self._worker = self._worker, None
        is_quick = self._loaded_at is None or loop.time() - self._loaded_at < self._policy.quick_death_s
        self.quick_deaths = self.quick_deaths + 1 if is_quick else 0
        pause_s = self._policy.pause_s(self.quick_deaths)
        _LOG.warning("lost the worker of %s: %s; next try in %.1f s", self.settings.model_path, reason, pause_s)
        self.state = WorkerState.WAITING
        self._timer = loop.call_later(pause_s, self._begin)
        self._on_lost(reason)

    def _retire(self) -> None:
        """Nothing is wanted any more. A new Load gets a new process, even while this one is still ending."""
        worker, self._worker = self._worker, None
        self._dead = None
        self.memory_limit = MemoryLimit(self.settings.kv_budget_bytes)  # whoever else needed the memory may be gone
        self._attempt += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.state = WorkerState.IDLE
        if worker is not None:
            self._own(worker.stop())

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
