"""A served shard in the daemon: the deciding core, its worker process, and the clock. Sends through whoever owns the links.

Imports neither numba nor torch; numbers live in the worker.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from potluck.core.device_facts import RESERVE_BYTES
from potluck.core.errors import DeviceUnavailable, OutOfDeviceMemory, PotluckError, ShardUnavailable
from potluck.core.looking import Pace
from potluck.core.processors import CROWD
from potluck.core.remembered import AnswerSoFar
from potluck.core.shard_health import LatencyWindow, ShardHealth
from potluck.net.spinning import Spinner
from potluck.shard import ahead
from potluck.shard.core import Remember, ShardCore, Suspect, Work
from potluck.shard.in_process import InProcessCaller, TensorChunk
from potluck.shard.settings import ShardSettings
from potluck.shard.worker_supervisor import WorkerSupervisor
from potluck.telemetry.metrics import Metrics
from potluck.wire.codecs import encoded_bytes
from potluck.wire.effects import SendTo
from potluck.wire.messages import Close, Message, Probe, ShardInfo
from potluck.wire.work import Attend, BatchDone, FromWorker, Loaded, LoadFailed, Rehearse, RunBatch, ToWorker
from potluck.wire.worker_settings import WorkerSettings

__all__ = ["ShardHealth", "ShardServer", "shard_id"]
_LOG = logging.getLogger(__name__)
_NOTE_AFTER_S = 1.0
_MEGABYTE = 1_000_000
_LOAD_ERRORS = {kind.code: kind for kind in (OutOfDeviceMemory, DeviceUnavailable)}


def shard_id(model: str, start: int, stop: int) -> str:
    """`<model>:<lo>-<hi>`, inclusive, as people see ranges."""
    return f"{model}:{start}-{stop - 1}"


def _load_error(shard: str, failure: LoadFailed) -> PotluckError:
    if failure.code in _LOAD_ERRORS:
        return _LOAD_ERRORS[failure.code](f"{shard} cannot be loaded: {failure.message}")
    return ShardUnavailable(f"{shard} cannot be loaded: {failure.code}: {failure.message}")


class Links(ahead.Links, Protocol):
    """Ways to other nodes."""

    def send_all(self, effects: Sequence[SendTo]) -> None: ...


class ShardServer:
    """Hosts one contiguous range of a model. Loaded at `start` or on the first OPEN; evicted when nobody has used it for long."""

    def __init__(
        self, node: bytes, settings: ShardSettings, worker: WorkerSettings, links: Links, metrics: Metrics
    ) -> None:
        self.core = ShardCore(node, settings, encoded_bytes)  # type: ignore[arg-type]
        self._latency_ms = metrics.shard_latency_ms.labels(shard_id=self.shard_id)
        self._latencies_s: list[float] = []  # written down when there is time
        self._last_latencies = LatencyWindow()
        self.core.observe = self._latencies_s.append
        self.supervisor = WorkerSupervisor(worker, self._on_worker_message, self._on_worker_lost)
        self.on_suspect: Callable[[bytes], None] = lambda node: None  # told whom a head has found lost
        self.on_remember: Callable[[bytes, AnswerSoFar], None] = lambda key, answer: None  # told of answers cut short
        self.on_load_changed: Callable[[], None] = lambda: None  # told when one of the next two has changed
        self.session_count = 0
        self.decodes_alone = False  # one session has the shard to itself, and is not reading a prompt
        self._links = links
        self._ahead = ahead.Ahead(self.core, self.supervisor, links, self._on_contradiction)
        self._looking_ahead: asyncio.Handle | None = None
        self._callers: dict[bytes, InProcessCaller] = {}
        self._loop = asyncio.get_running_loop()
        self._noting: asyncio.TimerHandle | None = None
        self._is_starting = False
        self._settled = asyncio.Event()  # loaded, or known not to be
        self._spinner = Spinner(self._loop, settings.spin_s)
        self.is_attending = False  # daemon and worker do not go to sleep for what comes soon (ADR 17)
        self._until_step, self._until_answer = Pace(settings.look_s), Pace(settings.look_s)
        self._failure: LoadFailed | None = None
        self._vram_mb = settings.vram_required_mb

    def __repr__(self) -> str:
        return f"<ShardServer {self.shard_id} {self.core!r} {self.supervisor!r}>"

    @property
    def settings(self) -> ShardSettings:
        return self.core.settings

    @property
    def shard_id(self) -> str:
        return shard_id(self.settings.model, self.settings.stage.start, self.settings.stage.stop)

    @property
    def load_failure(self) -> PotluckError | None:
        """Why it could not be loaded when it was tried last, be it for a session; None where it could, or was not tried."""
        return _load_error(self.shard_id, self._failure) if self._failure is not None else None

    async def start(self) -> None:
        """Loads the weights and returns when the shard is warm.

        Raises OutOfDeviceMemory, DeviceUnavailable or, for any other reason that they cannot be loaded, ShardUnavailable.
        """
        self._failure = None
        if not self.core.state.is_loaded:
            self._settled.clear()  # it may have been loaded before, and evicted, or not have been to be had
        self.core.load()
        self._carry_out()
        await self._settled.wait()
        if (failure := self.load_failure) is not None:
            raise failure

    async def forward(
        self, activations_in: AsyncIterable[TensorChunk], positions: int
    ) -> AsyncGenerator[TensorChunk, None]:
        """Activations in, activations out, for callers in this process; between nodes steps go straight from shard to shard.

        One session of up to `positions` positions, whose KV goes when the stream ends or is closed. Chunks that enter are float32 rows
        (token ids, where the shard has the embedding); those that leave are the rows after the last layer. Raises ShardUnavailable.
        """
        caller = InProcessCaller(self.settings, positions)
        self._callers[caller.id] = caller
        try:
            self.deliver(caller.id, caller.opening, b"")
            await caller.answer()
            async for chunk in activations_in:
                self.deliver(caller.id, caller.next_step(chunk.count), chunk.data)
                _, body = await caller.answer()
                yield TensorChunk(chunk.count, body)
        finally:
            self.deliver(caller.id, Close(caller.session), b"")
            del self._callers[caller.id]

    def deliver(self, sender: bytes, message: Message, body: bytes) -> None:
        idle_us = self._worker_idle_us() if type(message) is Probe else 0
        self.core.on_message(sender, message, body, time.monotonic(), idle_us)
        self._carry_out()
        if self.core.has_batch_to_start and not self._is_starting:
            self._is_starting = True
            self._loop.call_soon(self._start_batch)  # after whatever else has just come
        self._spinner.touch()

    def _start_batch(self) -> None:
        self._is_starting = False
        self.core.start_batch()
        self._carry_out()

    def node_lost(self, node: bytes) -> None:
        self.core.on_node_lost(node, time.monotonic())
        self._carry_out()

    def _worker_idle_us(self) -> int:
        last = self.supervisor.last_sign_of_life
        if last is None or not self.supervisor.is_busy:
            return 0
        return max(0, int((self._loop.time() - last) * 1e6))

    def _on_worker_message(self, message: FromWorker, body: bytes) -> None:
        now_s = time.monotonic()
        if type(message) is BatchDone:
            self._until_answer.end(now_s)
            self._ahead.on_answer(message, body, now_s)
        self.core.on_worker_message(message, body, now_s)
        self._carry_out()
        self._spinner.rest()
        if type(message) is BatchDone:
            if self.core.is_decoding is None:
                self._look_for(self._until_step)
            if self._noting is None:
                self._noting = self._loop.call_later(_NOTE_AFTER_S, self._note_latencies)
            return
        if isinstance(message, LoadFailed):
            self._failure = message
        elif isinstance(message, Loaded):
            self._failure = None
        if isinstance(message, Loaded) and message.device_bytes:
            self._vram_mb = -(-(message.device_bytes + RESERVE_BYTES) // _MEGABYTE)
        if self.core.state.is_loaded or self._failure is not None:
            self._settled.set()

    def _note_latencies(self) -> None:
        """A second's steps at once: while one is on its way nobody needs the metrics."""
        self._noting = None
        while self._latencies_s:
            latency_ms = self._latencies_s.pop() * 1000
            self._latency_ms.observe(latency_ms)
            self._last_latencies.note(latency_ms)

    def _on_worker_lost(self, reason: str) -> None:
        self.core.on_worker_lost(reason)
        self._carry_out()

    def _carry_out(self) -> None:
        to_send: list[SendTo] = []
        left, effects = self._ahead.take_effects()
        if type(left) is Work:
            self._note_work(left.message)
        for effect in effects:
            if type(effect) is Work:
                self.supervisor.send(effect.message, effect.body)
                self._note_work(effect.message)
            elif type(effect) is SendTo:
                caller = self._callers.get(effect.node) if self._callers else None
                to_send.append(effect) if caller is None else caller.hear(effect)
            elif isinstance(effect, Remember):
                self.on_remember(effect.key, effect.answer)
            elif isinstance(effect, Suspect):
                self.on_suspect(effect.node)
        if to_send:
            self._links.send_all(to_send)
        if self.core.session_count != self.session_count:
            self.session_count, self.decodes_alone = self.core.session_count, False
            self.on_load_changed()
        if self.session_count == 1 and self._looking_ahead is None:
            self._looking_ahead = self._loop.call_soon(self._look_ahead)

    def _look_ahead(self) -> None:
        self._looking_ahead = None
        self._ahead.look()
        is_decoding = self.core.is_decoding
        if is_decoding is not None and is_decoding != self.decodes_alone:
            self.decodes_alone = is_decoding
            self.on_load_changed()

    def _on_contradiction(self) -> None:
        """Nobody may go on from what has left, and heads know what to do where a worker is gone."""
        self.core.counters["wrong_foresight"] += 1
        _LOG.error("%s: what has left is not what was decided then; ending its worker", self.shard_id)
        self.supervisor.abandon("it was told what had not been decided")

    def _note_work(self, message: ToWorker) -> None:
        if type(message) is Rehearse:
            self._watch()
        elif type(message) is RunBatch:
            self._spinner.rest()
            self._until_step.end(time.monotonic())
            self._look_for(self._until_answer)
            if (wait_s := self.core.rehearsals.due_in_s()) is not None:
                self._loop.call_later(wait_s, self._rehearse, message.batch)

    def _rehearse(self, batch: int) -> None:
        if self.core.rehearsals.send(batch):
            self._carry_out()
            self._watch()

    def attend(self, is_wanted: bool) -> None:
        """To be wanted while the node's only answer is being decoded here."""
        if is_wanted != self.is_attending and self.settings.look_s:
            self.is_attending = is_wanted
            self.supervisor.send(Attend(self.settings.look_s if is_wanted else 0.0))

    def _look_for(self, awaited: Pace) -> None:
        if self.is_attending:
            awaited.begin(time.monotonic())
            if awaited.is_soon and not CROWD.is_there:
                self._spinner.stay_awake(awaited.soon_s)

    def _watch(self) -> None:
        """What was rehearsed is about to come."""
        if self.settings.rehearsal_watch_s > 0:
            self._spinner.stay_awake(self.settings.rehearsal_watch_s)

    def info(self) -> ShardInfo:
        settings, state = self.settings, self.core.state
        return ShardInfo(
            settings.model, settings.weights_sha256, settings.arithmetic, settings.layer_count, settings.stage, state.is_loaded,
            settings.max_concurrent_streams, state.streams, state.queue_depth, state.step_us, settings.is_spare,
            self._vram_mb,
        )  # fmt: skip

    async def health(self) -> ShardHealth:
        """Online: it takes sessions, as one that is loaded does, or one that was evicted and loads again for the next."""
        state = self.core.state
        is_online = state.is_loaded or not (self._failure is not None or self.supervisor.needs_attention)
        self._note_latencies()
        latency_ms = self._last_latencies.p95_ms
        return ShardHealth(self.shard_id, is_online, datetime.now(UTC), latency_ms, state.queue_depth)

    def evict_if_idle(self) -> None:
        now_s = time.monotonic()
        self.core.give_up_silent(now_s)
        self.core.evict_if_idle(now_s)
        self._carry_out()

    async def evict(self) -> None:
        """Frees the worker's memory now, unless sessions live on it."""
        self.core.evict()
        self._carry_out()

    def give_up(self) -> None:
        """Whoever has a session here, or waits for one, hears that at once and goes elsewhere. To be followed by `stop`."""
        if self.core.state.streams:
            self._on_worker_lost("the shard was given up")

    async def stop(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
            self._note_latencies()
        self._spinner.stop()
        if self._looking_ahead is not None:
            self._looking_ahead.cancel()
        self._ahead.forget()
        await self.supervisor.stop()
