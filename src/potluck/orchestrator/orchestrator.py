"""Runs generations: finds shards, hands messages, losses and time to each generation, and streams its frames.

The deciding is `generation.py`'s; here is what needs a loop. Every task has an owner; a generation's reader that goes away ends it.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from potluck.core.errors import ShardUnavailable
from potluck.core.remembered import AnswerSoFar
from potluck.core.shard_health import ShardHealth
from potluck.net.peers import PeerLinks
from potluck.orchestrator.addresses import Addresses
from potluck.orchestrator.choosing import Choosing, rounded
from potluck.orchestrator.frames import Finished, PipelineAborted, StreamFrame, TokenDelta
from potluck.orchestrator.generation import Generation, GenerationRequest, StepTiming
from potluck.orchestrator.params import DistributedChatParams
from potluck.orchestrator.questions import Questions
from potluck.orchestrator.reuse import KeptPipelines, ReuseKey, reuse_key
from potluck.orchestrator.router import ShardHealthTracker
from potluck.orchestrator.routing import ShardStore
from potluck.orchestrator.running import Running
from potluck.orchestrator.tracing import GenerationTrace, Traces
from potluck.orchestrator.watching import Watched
from potluck.planner.alike import Replacer
from potluck.planner.costs import Links
from potluck.planner.cover import Placed
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.messages import MAX_HISTORY, AnswerData, Close, Described, Failed, Message, Opened, TokenizerData


class PipelineOrchestrator:
    """Heads generations for one node. `store` holds the shards that are on offer; `connect` and the swarm fill it."""

    def __init__(
        self, node: bytes, links: PeerLinks, send: Callable[[SendTo], None], metrics: Metrics, most: int = 64
    ) -> None:
        self.store = ShardStore()
        self.traces = Traces()
        self.health = ShardHealthTracker()  # by "<node>:<lo>-<hi>", as the frames name shards
        self.on_ended: Callable[[bytes, AnswerSoFar], None] = lambda key, answer: (
            None
        )  # told of answers that can be resumed
        self.on_load_changed: Callable[[], None] = lambda: None  # told when `decodes_alone` may have changed
        self._kept = KeptPipelines()
        self.max_concurrent_pipelines = most
        self._node, self._send, self._metrics = node, send, metrics
        self._running: list[Running] = []
        self._heard: dict[bytes, Running] = {}  # by session; some of them before a failover
        self._started = 0
        self._questions = Questions(send)
        self._addresses = Addresses(links, self._questions, self.store, self._returned)
        self._choosing = Choosing(node, links, self.store, self._kept)

    def __repr__(self) -> str:
        return f"<PipelineOrchestrator {len(self._running)} running, {self.store!r}>"

    @property
    def decodes_alone(self) -> bool:
        """There is one answer, and it has begun."""
        return len(self._running) == 1 and self._running[0].has_begun

    @property
    def pipelines(self) -> tuple[tuple[Placed, ...], ...]:
        """The stages of each generation that runs now, oldest first."""
        return tuple(running.generation.stages for running in self._running)

    def shard_health(self) -> list[ShardHealth]:
        """Of every shard that has taken part in an answer of this node."""
        return self.health.all(time.monotonic())

    def watched(self) -> list[Watched]:
        """The generations that run now, oldest first."""
        return [running.watched()._replace(standbys=self._standbys(running)) for running in self._running]

    def _standbys(self, running: Running) -> tuple[tuple[Placed, ...], ...]:
        generation = running.generation
        return self._choosing.standbys(generation.request, running.params, generation.stages)

    def _watch_timings(self, running: Running, trace: GenerationTrace) -> None:
        generation, tell = running.generation, running.generation.on_timing

        def note(timing: StepTiming) -> None:
            running.timings.note(timing)
            trace.step(timing, generation.stages, time.perf_counter())
            for name, (compute_s, queue_s) in zip(generation.stage_names, timing.stages, strict=False):
                self.health.note(name, (compute_s + queue_s) * 1000, time.monotonic())
            tell(timing)

        running.generation.on_timing = note

    # ------------------------------------------------------------ finding shards

    async def connect(self, addresses: Sequence[str]) -> list[Described]:
        """Links to these addresses and asks what they serve. Those that cannot be reached are tried again later."""
        return await self._addresses.connect(addresses)

    def links_are(self, links: Links) -> None:
        """As measured between nodes, by the swarm."""
        self._choosing.measured_links = links

    def offer(self, offers: Sequence[tuple[bytes, str, Described, bool]]) -> None:
        """Everything that is on offer now: node, address, what it serves, whether it is this node. The swarm's view feeds it.

        Generations that wait for layers look again where something has changed.
        """
        for node in self.store.nodes() - {node for node, *_ in offers}:
            self.store.remove(node)
        for node, address, described, is_own in offers:
            if self.store.offer_of(node) != (address, described):
                self.store.put(node, address, described, is_own=is_own)
                self._returned(node)

    def _returned(self, node: bytes) -> None:
        now = time.monotonic()
        for running in list(self._running):
            running.generation.on_returned(node, now)
            self._carry_out(running)

    async def ask(self, node: bytes, question: Callable[[int], Message]) -> tuple[Message, bytes]:
        """One request and its answer. Raises TimeoutError, LinkClosed; a Failed answer is raised as what it says."""
        return await self._questions.ask(node, question)

    async def fetch_tokenizer(self, node: bytes, weights_sha256: str) -> tuple[bytes, bytes]:
        """The manifest and the tokenizer of a model, as a shard has them; the caller checks them against the hash."""
        offer = self.store.offer_of(node)  # in a large swarm not everybody has a link to it
        return await self._questions.fetch_tokenizer(node, weights_sha256, None if offer is None else offer[0])

    async def ask_for_answer(
        self, proofs: Mapping[bytes, bytes], most_tokens: int = MAX_HISTORY
    ) -> tuple[AnswerSoFar, ...]:
        """What any of them says about an answer that broke off; who does not answer soon is not waited for."""
        return await self._questions.ask_for_answer(proofs, most_tokens)

    def on_answer(self, sender: bytes, message: Described | TokenizerData | AnswerData | Failed, body: bytes) -> None:
        self._questions.on_answer(sender, message, body)

    # ------------------------------------------------------------ generating

    async def chat(
        self, request: GenerationRequest, params: DistributedChatParams
    ) -> AsyncGenerator[StreamFrame, None]:
        """Streams frames to the end. Leaving the loop early cancels the generation and frees every shard."""
        if len(self._running) >= self.max_concurrent_pipelines:
            raise ShardUnavailable(f"all {self.max_concurrent_pipelines} pipelines are in use")
        self._started += 1
        running = Running(self._generation(request, params), params.label or str(self._started), params)
        trace = self.traces.begin(running.label, request.model, time.perf_counter())
        self._watch_timings(running, trace)
        self._running.append(running)
        self.on_load_changed()
        nodes = [placed.node for placed in running.generation.stages]
        self.store.begin_streams(nodes, request.weights_sha256)
        try:
            running.generation.start(time.monotonic())
            self._carry_out(running)
            if params.on_begun is not None:
                params.on_begun(running.generation.request)
            if params.on_stages is not None:
                params.on_stages(running.generation.stages)
            while True:
                frame = await running.frames.get()
                had_begun = running.has_begun
                running.note(frame, self._metrics)
                if running.has_begun != had_begun:
                    self.on_load_changed()
                trace.frame(frame)
                if isinstance(frame, TokenDelta):
                    running.generation.consumed(1, time.monotonic())
                    self._carry_out(running)
                elif params.on_stages is not None:
                    params.on_stages(running.generation.stages)
                yield frame
                if isinstance(frame, Finished | PipelineAborted):
                    return
        finally:
            self.traces.end(trace, time.perf_counter())
            running.generation.cancel()
            self._carry_out(running)
            self._running.remove(running)
            self.on_load_changed()
            self._heard = {session: each for session, each in self._heard.items() if each is not running}
            self.store.end_streams(nodes, request.weights_sha256)
            self._keep(running.generation, reuse_key(request, params.activation_dtype))
            if request.resume_key:
                self.on_ended(request.resume_key, running.generation.answer)
            if running.timer is not None:
                running.timer.cancel()

    def abort_all(self, code: str, message: str) -> None:
        """For a reason that lies with this node: what has come is still read, and nothing is waited for."""
        for running in self._running:
            running.frames.put_nowait(PipelineAborted(code, message, len(running.generation.generated)))

    def _keep(self, generation: Generation, key: ReuseKey) -> None:
        if generation.kept is None:
            return
        now_s = time.monotonic()
        for old in self._kept.put(key, generation.kept, now_s):
            for placed, session in zip(old.stages, old.sessions, strict=True):
                self._send(SendTo(placed.node, None, Close(session)))

    def recall(self, resume_key: bytes) -> AnswerSoFar | None:
        """An answer that this node heads at this moment: its reader may be gone, and nobody has noticed yet."""
        generations = (running.generation for running in self._running)
        return next((each.answer for each in generations if each.request.resume_key == resume_key), None)

    @property
    def resume_keys(self) -> list[bytes]:
        """Of the answers that it heads at this moment."""
        keys = (running.generation.request.resume_key for running in self._running)
        return [key for key in keys if key]

    def pipeline_for(self, request: GenerationRequest, params: DistributedChatParams) -> list[Placed]:
        """The shards that a request would use. Raises ShardUnavailable with what is missing."""
        return self._choosing.pipeline_for(request, params)

    def _generation(self, request: GenerationRequest, params: DistributedChatParams) -> Generation:
        choosing = self._choosing
        resumption = choosing.resumption(request, params)
        if resumption is None:
            pipeline: Sequence[Placed] = choosing.pipeline_for(request, params)
            request = rounded(request, pipeline, params.activation_dtype)
        else:
            pipeline = resumption.kept.stages
            request = msgspec.structs.replace(request, boundaries=resumption.kept.boundaries)
        repick = functools.partial(choosing.replacements, request, params, Replacer(pipeline))
        generation = Generation(
            request, pipeline, repick, params.settings, lambda: os.urandom(16), self._node, resumption
        )
        if params.on_timing is not None:
            generation.on_timing = params.on_timing
        return generation

    def on_message(self, sender: bytes, session: bytes, message: Message, body: bytes = b"") -> bool:
        """Whether a generation knows that session."""
        running = self._running_with(session)
        if running is None:
            return False
        if isinstance(message, Opened):
            self.store.clear_suspicion(sender)  # it works
        running.generation.on_message(sender, message, time.monotonic(), body)
        self._carry_out(running)
        return True

    def _running_with(self, session: bytes) -> Running | None:
        """Whoever was found is remembered: most that comes is tokens, of the same few sessions."""
        found = self._heard.get(session)
        if found is None or not found.generation.has_session(session):
            found = next((each for each in self._running if each.generation.has_session(session)), None)
            if found is not None:
                self._heard[session] = found
        return found

    def on_suspect(self, node: bytes) -> None:
        """The head of a pipeline that this node has a part in has found that node lost."""
        self.store.suspect(node, time.monotonic())

    def on_lost(self, node: bytes, reason: str) -> None:
        self._kept.forget(node)
        self._questions.on_lost(node, reason)
        now = time.monotonic()
        for running in list(self._running):
            running.generation.on_lost(node, reason, now)
            self._carry_out(running)

    def _carry_out(self, running: Running) -> None:
        for effect in running.generation.take_effects():
            self._send(effect)
        for frame in running.generation.take_frames():
            running.frames.put_nowait(frame)
        self._set_timer(running)

    def _set_timer(self, running: Running) -> None:
        """One that rings too early does no harm, so it is left alone while every token puts the time off."""
        if running.generation.is_ended:
            return running.drop_timer()
        wake_s = running.generation.next_wake_s()
        if running.timer is None or wake_s < running.timer_s:
            running.drop_timer()
            running.timer_s = wake_s
            running.timer = asyncio.get_running_loop().call_at(wake_s, self._on_time, running)
        return None

    def _on_time(self, running: Running) -> None:
        running.timer = None
        running.generation.on_time(time.monotonic())
        self._carry_out(running)

    async def close(self) -> None:
        await self._addresses.close()
