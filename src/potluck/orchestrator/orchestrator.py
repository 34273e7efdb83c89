"""Runs generations: finds shards, hands messages, losses and time to each generation, and streams its frames.

The deciding is `generation.py`'s; here is what needs a loop. Every task has an owner; a generation's reader that goes away ends it.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from potluck.core.errors import BadRequest, PotluckError, ShardUnavailable
from potluck.net.peers import PeerLinks
from potluck.orchestrator.frames import (
    Finished,
    PipelineAborted,
    ShardFailover,
    ShardStatus,
    StreamFrame,
    TokenDelta,
)
from potluck.orchestrator.generation import Generation, GenerationRequest, GenerationSettings, Phase, StepTiming
from potluck.orchestrator.routing import ShardStore
from potluck.orchestrator.tracing import GenerationTrace, Traces
from potluck.orchestrator.watching import StageTimings, Watched
from potluck.planner.cover import Candidate, Placed, check_tiling, cover_around
from potluck.planner.route import RouteRules, quickest_around, quickest_replacements
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.messages import Describe, Described, Failed, GetTokenizer, Message, Opened, Stage, TokenizerData

_ANSWER_TIMEOUT_S = 5.0
_RETRY_S = 0.5


class DistributedChatParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request uses the pipeline; the generation's own settings, and limits of the caller."""

    settings: GenerationSettings = GenerationSettings()
    fallback_to_local: bool = True
    max_shards_per_request: int = 16
    own_layers: tuple[Stage, ...] = ()  # this node's own ends of the model, which it serves itself
    pipeline: tuple[Placed, ...] = ()  # exactly these stages, instead of a choice
    allow_self_as_shard: bool = False  # whether this node's own shards count as any other's
    label: str = ""  # what people see the request as
    on_timing: Callable[[StepTiming], None] | None = None  # told of every token's way round
    on_stages: Callable[[tuple[Placed, ...]], None] | None = None  # told who takes part, again after each change


class Running:
    """One generation and its reader."""

    def __init__(self, generation: Generation, label: str) -> None:
        self.generation, self.label = generation, label
        self.timings = StageTimings()
        self.frames: asyncio.Queue[StreamFrame] = asyncio.Queue()
        self.timer: asyncio.TimerHandle | None = None
        self._began_s = self._first_s = asyncio.get_running_loop().time()
        self._tokens = 0

    def note(self, frame: StreamFrame, metrics: Metrics) -> None:
        """Counts what a frame tells; nothing of its content."""
        now = asyncio.get_running_loop().time()
        if isinstance(frame, TokenDelta):
            self._tokens += 1
            if self._tokens == 1:
                self._first_s = now
                metrics.first_token_ms.observe((now - self._began_s) * 1000)
                metrics.pipeline_construct_ms.observe(((self.generation.formed_s or now) - self._began_s) * 1000)
        elif isinstance(frame, ShardFailover):
            metrics.failovers.inc()
            metrics.failover_pause_ms.observe(frame.pause_ms)
            if self.generation.uses_own_copy:
                metrics.fallback_to_local.inc()
        elif isinstance(frame, ShardStatus) and frame.code == "shard_corruption":
            metrics.shard_corruption_detected.labels(node=frame.node[:16]).inc()
        elif isinstance(frame, Finished) and self._tokens > 1:
            metrics.tokens_per_second.set((self._tokens - 1) / max(now - self._first_s, 1e-9))

    def watched(self) -> Watched:
        generation, now = self.generation, asyncio.get_running_loop().time()
        elapsed_s = max(now - self._first_s, 1e-9)
        return Watched(
            self.label, generation.request.model, self._phase(), self._tokens,
            round((self._tokens - 1) / elapsed_s, 2) if self._tokens > 1 else 0.0, generation.failovers, generation.stages,
            self.timings.shown(),
        )  # fmt: skip

    def _phase(self) -> str:
        phase = self.generation.phase
        if phase is Phase.WAITING or (phase is Phase.FORMING and self._tokens):
            return "recovering"
        if phase in (Phase.NEW, Phase.FORMING):
            return "queued"
        return "decode" if self._tokens else "prefill"


class PipelineOrchestrator:
    """Heads generations for one node. `store` holds the shards that are on offer; `connect` and the swarm fill it."""

    def __init__(
        self, node: bytes, links: PeerLinks, send: Callable[[SendTo], None], metrics: Metrics, most: int = 64
    ) -> None:
        self.store = ShardStore()
        self.traces = Traces()
        self.max_concurrent_pipelines = most
        self._node, self._links, self._send, self._metrics = node, links, send, metrics
        self._running: list[Running] = []
        self._started = 0
        self._answers: dict[tuple[bytes, int], asyncio.Future[tuple[Message, bytes]]] = {}
        self._nonce = 0
        self._addresses: dict[str, bytes | None] = {}
        self._retrying: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<PipelineOrchestrator {len(self._running)} running, {self.store!r}>"

    @property
    def pipelines(self) -> tuple[tuple[Placed, ...], ...]:
        """The stages of each generation that runs now, oldest first."""
        return tuple(running.generation.stages for running in self._running)

    def watched(self) -> list[Watched]:
        """The generations that run now, oldest first."""
        return [running.watched() for running in self._running]

    @staticmethod
    def _watch_timings(running: Running, trace: GenerationTrace) -> None:
        generation, tell = running.generation, running.generation.on_timing

        def note(timing: StepTiming) -> None:
            running.timings.note(timing)
            trace.step(timing, generation.stages, time.perf_counter())
            tell(timing)

        running.generation.on_timing = note

    # ------------------------------------------------------------ finding shards

    async def connect(self, addresses: Sequence[str]) -> list[Described]:
        """Links to these addresses and asks what they serve. Those that cannot be reached are tried again later."""
        answers = await asyncio.gather(*(self._try(address) for address in addresses))
        if self._retrying is None:
            self._retrying = asyncio.get_running_loop().create_task(self._retry())
        found = [answer for answer in answers if answer is not None]
        if not found:
            raise ShardUnavailable(f"none of {', '.join(addresses)} can be reached")
        return found

    async def _try(self, address: str) -> Described | None:
        self._addresses.setdefault(address, None)
        try:
            node = await self._links.connect(address)
            answer, _ = await self.ask(node, Describe)
        except (PotluckError, OSError, TimeoutError):
            return None
        if not isinstance(answer, Described) or answer.node != node:
            return None
        self._addresses[address] = node
        self.store.put(node, address, answer)
        return answer

    async def _retry(self) -> None:
        """Looks for nodes that were lost, so that a pipeline that waits for one goes on when it is back."""
        while True:
            await asyncio.sleep(_RETRY_S)
            for address, node in list(self._addresses.items()):
                if node is None or not self._links.is_linked(node):
                    answer = await self._try(address)
                    if answer is not None:
                        self._returned(answer.node)

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
        now = asyncio.get_running_loop().time()
        for running in list(self._running):
            running.generation.on_returned(node, now)
            self._carry_out(running)

    async def ask(self, node: bytes, question: Callable[[int], Message]) -> tuple[Message, bytes]:
        """One request and its answer. Raises TimeoutError; a Failed answer is raised as what it says."""
        self._nonce += 1
        nonce = self._nonce
        future: asyncio.Future[tuple[Message, bytes]] = asyncio.get_running_loop().create_future()
        self._answers[node, nonce] = future
        try:
            self._send(SendTo(node, None, question(nonce)))
            answer, body = await asyncio.wait_for(future, _ANSWER_TIMEOUT_S)
        finally:
            self._answers.pop((node, nonce), None)
        if isinstance(answer, Failed):
            raise BadRequest(f"{answer.code}: {answer.message}")
        return answer, body

    async def fetch_tokenizer(self, node: bytes, weights_sha256: str) -> tuple[bytes, bytes]:
        """The manifest and the tokenizer of a model, as a shard has them; the caller checks them against the hash."""
        answer, body = await self.ask(node, lambda nonce: GetTokenizer(nonce, weights_sha256))
        if not isinstance(answer, TokenizerData) or answer.manifest_bytes + answer.tokenizer_bytes != len(body):
            raise BadRequest("a shard answered with something else than a tokenizer")
        return body[: answer.manifest_bytes], body[answer.manifest_bytes :]

    def on_answer(self, sender: bytes, message: Described | TokenizerData | Failed, body: bytes) -> None:
        """Taken from whoever was asked, and from nobody else; what nobody waits for is dropped."""
        future = self._answers.get((sender, message.nonce))
        if future is not None and not future.done():
            future.set_result((message, body))

    # ------------------------------------------------------------ generating

    async def chat(
        self, request: GenerationRequest, params: DistributedChatParams
    ) -> AsyncGenerator[StreamFrame, None]:
        """Streams frames to the end. Leaving the loop early cancels the generation and frees every shard."""
        if len(self._running) >= self.max_concurrent_pipelines:
            raise ShardUnavailable(f"all {self.max_concurrent_pipelines} pipelines are in use")
        self._started += 1
        running = Running(self._generation(request, params), params.label or str(self._started))
        loop = asyncio.get_running_loop()
        trace = self.traces.begin(running.label, request.model, time.perf_counter())
        self._watch_timings(running, trace)
        self._running.append(running)
        try:
            running.generation.start(loop.time())
            self._carry_out(running)
            if params.on_stages is not None:
                params.on_stages(running.generation.stages)
            while True:
                frame = await running.frames.get()
                running.note(frame, self._metrics)
                trace.frame(frame)
                if isinstance(frame, TokenDelta):
                    running.generation.consumed(1, loop.time())
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
            if running.timer is not None:
                running.timer.cancel()

    def pipeline_for(self, request: GenerationRequest, params: DistributedChatParams) -> list[Placed]:
        """The shards that a request would use. Raises ShardUnavailable with what is missing."""
        if params.pipeline:
            problem = check_tiling([placed.stage for placed in params.pipeline], request.layer_count)
            if problem is not None:
                raise BadRequest(problem)
            return list(params.pipeline)
        candidates = self._candidates(request, params.fallback_to_local, params.allow_self_as_shard)
        own = [Placed(self._node, "", stage) for stage in params.own_layers]
        reachable = [candidate for candidate in candidates if self._is_reachable(candidate.node)]
        rules = RouteRules(max_shards=params.max_shards_per_request)
        placed = quickest_around(reachable, own, request.layer_count, rules)
        placed = placed or quickest_around(candidates, own, request.layer_count, rules)
        if placed is None:
            raise ShardUnavailable(self._why_not(request, candidates, own, params.max_shards_per_request))
        return placed

    def _why_not(
        self, request: GenerationRequest, candidates: list[Candidate], own: list[Placed], max_shards: int
    ) -> str:
        """Which rule stood in the way, where it was not a missing layer."""
        cover = cover_around(candidates, own, request.layer_count)
        if cover is None:
            return self.store.explain_gap(request.model, request.weights_sha256, request.layer_count)
        if len(cover) > max_shards:
            return f"{len(cover)} shards would be needed; at most {max_shards} may be used"
        return f"every holder of some layers of {request.model} has as many streams as it takes"

    def _is_reachable(self, node: bytes) -> bool:
        return node == self._node or self._links.is_linked(node)

    def _candidates(
        self, request: GenerationRequest, allows_local: bool, is_own_equal: bool = False
    ) -> list[Candidate]:
        now_s = asyncio.get_running_loop().time()
        return self.store.candidates(
            request.weights_sha256, request.arithmetic, allows_local or is_own_equal, now_s, is_own_equal
        )

    def _generation(self, request: GenerationRequest, params: DistributedChatParams) -> Generation:
        def repick(
            kept: Sequence[Placed | None], excluded: frozenset[bytes], allows_local: bool
        ) -> list[list[Placed]] | None:
            reachable = [
                c
                for c in self._candidates(request, allows_local and params.fallback_to_local)
                if self._is_reachable(c.node)
            ]
            rules = RouteRules(max_shards=params.max_shards_per_request)
            return quickest_replacements(kept, reachable, excluded, request.layer_count, rules)

        pipeline = self.pipeline_for(request, params)
        generation = Generation(request, pipeline, repick, params.settings, lambda: os.urandom(16), self._node)
        if params.on_timing is not None:
            generation.on_timing = params.on_timing
        return generation

    def on_message(self, sender: bytes, session: bytes, message: Message, body: bytes = b"") -> bool:
        """Whether a generation knows that session."""
        for running in self._running:
            if session in running.generation.sessions:
                if isinstance(message, Opened):
                    self.store.clear_suspicion(sender)  # it works
                running.generation.on_message(sender, message, asyncio.get_running_loop().time(), body)
                self._carry_out(running)
                return True
        return False

    def on_suspect(self, node: bytes) -> None:
        """The head of a pipeline that this node has a part in has found that node lost."""
        self.store.suspect(node, asyncio.get_running_loop().time())

    def on_lost(self, node: bytes, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        for running in list(self._running):
            running.generation.on_lost(node, reason, now)
            self._carry_out(running)

    def _carry_out(self, running: Running) -> None:
        for effect in running.generation.take_effects():
            self._send(effect)
        for frame in running.generation.take_frames():
            running.frames.put_nowait(frame)
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        if not running.generation.is_ended:
            loop = asyncio.get_running_loop()
            running.timer = loop.call_at(running.generation.next_wake_s(), self._on_time, running)

    def _on_time(self, running: Running) -> None:
        running.generation.on_time(asyncio.get_running_loop().time())
        self._carry_out(running)

    async def close(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)
