"""Runs generations: finds shards, hands messages, losses and time to each generation, and streams its frames.

The deciding is `generation.py`'s; here is what needs a loop. Every task has an owner; a generation's reader that goes away ends it.
"""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

import msgspec

from potluck.core.errors import BadRequest, LinkClosed, PotluckError, ShardsFull, ShardUnavailable
from potluck.core.limits import ARITHMETIC_VERSION, MAX_SHARDS_PER_REQUEST
from potluck.core.shard_health import ShardHealth
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
from potluck.orchestrator.reuse import Kept, KeptPipelines, Resumption, ReuseKey, reuse_key
from potluck.orchestrator.router import ShardHealthTracker
from potluck.orchestrator.routing import ShardStore
from potluck.orchestrator.tracing import GenerationTrace, Traces
from potluck.orchestrator.watching import StageTimings, Watched
from potluck.planner.alike import Replacer, pick_pipeline
from potluck.planner.costs import Links
from potluck.planner.cover import Candidate, Placed, check_tiling, cover_around
from potluck.planner.route import RouteRules, are_held, between_own, standby
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Boundary,
    Close,
    Codec,
    Describe,
    Described,
    Failed,
    GetTokenizer,
    Message,
    Opened,
    Stage,
    TokenizerData,
)

_ANSWER_TIMEOUT_S = 5.0
_RETRY_S = 0.5
_REFRESH_S = 2.0  # between questions how busy those are that were named by address
_SLOW_HOP_S = 0.01  # one way: no LAN, so bytes are dear there


class DistributedChatParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request uses the pipeline; the generation's own settings, and limits of the caller."""

    settings: GenerationSettings = GenerationSettings()
    fallback_to_local: bool = True
    max_shards_per_request: int = MAX_SHARDS_PER_REQUEST
    own_layers: tuple[Stage, ...] = ()  # this node's own ends of the model, which it serves itself
    own_arithmetic: int = ARITHMETIC_VERSION  # that it computes them by
    pipeline: tuple[Placed, ...] = ()  # exactly these stages, instead of a choice
    allow_self_as_shard: bool = False  # whether this node's own shards count as any other's
    activation_dtype: Codec | Literal["auto"] = "auto"  # between stages, where a request names no boundaries
    label: str = ""  # what people see the request as
    on_timing: Callable[[StepTiming], None] | None = None  # told of every token's way round
    on_stages: Callable[[tuple[Placed, ...]], None] | None = None  # told who takes part, again after each change

    @property
    def own_place(self) -> Literal["last", "equal"]:
        return "equal" if self.allow_self_as_shard else "last"

    @property
    def allows_own(self) -> bool:
        """Whether this node's own shards may be used at all."""
        return self.fallback_to_local or self.allow_self_as_shard


class Running:
    """One generation and its reader."""

    def __init__(self, generation: Generation, label: str, params: DistributedChatParams) -> None:
        self.generation, self.label, self.params = generation, label, params
        self.timings = StageTimings()
        self.frames: asyncio.Queue[StreamFrame] = asyncio.Queue()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_s = 0.0
        self._began_s = self._first_s = time.monotonic()
        self._tokens = 0
        self._has_fallen_back = self._has_told_formed = False

    def drop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def note(self, frame: StreamFrame, metrics: Metrics) -> None:
        """Counts what a frame tells; nothing of its content."""
        now = time.monotonic()
        if self.generation.formed_s is not None and not self._has_told_formed:
            self._has_told_formed = True
            metrics.pipeline_construct_ms.observe((self.generation.formed_s - self._began_s) * 1000)
        if isinstance(frame, TokenDelta):
            self._tokens += 1
            if self._tokens == 1:
                self._first_s = now
                metrics.first_token_ms.observe((now - self._began_s) * 1000)
        elif isinstance(frame, ShardFailover):
            metrics.failovers.inc()
            metrics.failover_pause_ms.observe(frame.pause_ms)
            if self.generation.fell_back and not self._has_fallen_back:
                self._has_fallen_back = True
                metrics.fallback_to_local.inc()
        elif isinstance(frame, ShardStatus) and frame.code == "shard_corruption":
            metrics.shard_corruption_detected.labels(node=frame.node[:16]).inc()
        elif isinstance(frame, Finished):
            metrics.reused_tokens.inc(frame.reused_tokens)
            if self._tokens > 1:
                metrics.tokens_per_second.set((self._tokens - 1) / max(now - self._first_s, 1e-9))

    def watched(self) -> Watched:
        generation, now = self.generation, time.monotonic()
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
        self.health = ShardHealthTracker()  # by "<node>:<lo>-<hi>", as the frames name shards
        self._kept = KeptPipelines()
        self.max_concurrent_pipelines = most
        self.measured_links: Links | None = None  # between nodes, as the swarm tells; None: nothing was measured
        self._node, self._links, self._send, self._metrics = node, links, send, metrics
        self._running: list[Running] = []
        self._started = 0
        self._answers: dict[tuple[bytes, int], asyncio.Future[tuple[Message, bytes]]] = {}
        self._nonce = 0
        self._addresses: dict[str, bytes | None] = {}
        self._looking: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<PipelineOrchestrator {len(self._running)} running, {self.store!r}>"

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
        """Who would take over each stage if its node went now; of what this node keeps for itself, itself."""
        request, params = running.generation.request, running.params
        own = [Placed(self._node, "", stage) for stage in params.own_layers]
        offered = self._candidates(request, params.fallback_to_local)
        offered = between_own(offered, own) if own else offered
        reachable = [candidate for candidate in offered if self._is_reachable(candidate.node)]
        rules = self._rules(request, params)
        stages = running.generation.stages
        return tuple((each,) if each in own else standby(reachable, each, rules) for each in stages)

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
        answers = await asyncio.gather(*(self._try(address) for address in addresses))
        if not self._looking:
            loop = asyncio.get_running_loop()
            self._looking = [loop.create_task(self._retry()), loop.create_task(self._keep_fresh())]
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

    async def _keep_fresh(self) -> None:
        """Who is full, and how long queues are, was true when they said so. (In a swarm adverts tell it.)"""
        while True:
            await asyncio.sleep(_REFRESH_S)
            known = [(address, node) for address, node in self._addresses.items() if node is not None]
            await asyncio.gather(*(self._refresh(address, node) for address, node in known))

    async def _refresh(self, address: str, node: bytes) -> None:
        if not self._links.is_linked(node):
            return
        try:
            answer, _ = await self.ask(node, Describe)
        except (PotluckError, TimeoutError):
            return  # whoever uses it will find out
        is_on_offer = self.store.offer_of(node) is not None
        if is_on_offer and isinstance(answer, Described) and answer.node == node:
            self.store.put(node, address, answer)

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
        running = Running(self._generation(request, params), params.label or str(self._started), params)
        trace = self.traces.begin(running.label, request.model, time.perf_counter())
        self._watch_timings(running, trace)
        self._running.append(running)
        nodes = [placed.node for placed in running.generation.stages]
        self.store.begin_streams(nodes, request.weights_sha256)
        try:
            running.generation.start(time.monotonic())
            self._carry_out(running)
            if params.on_stages is not None:
                params.on_stages(running.generation.stages)
            while True:
                frame = await running.frames.get()
                running.note(frame, self._metrics)
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
            self.store.end_streams(nodes, request.weights_sha256)
            self._keep(running.generation, reuse_key(request, params.activation_dtype))
            if running.timer is not None:
                running.timer.cancel()

    def _keep(self, generation: Generation, key: ReuseKey) -> None:
        if generation.kept is None:
            return
        now_s = time.monotonic()
        for old in self._kept.put(key, generation.kept, now_s):
            for placed, session in zip(old.stages, old.sessions, strict=True):
                self._send(SendTo(placed.node, None, Close(session)))

    def _resumption(self, request: GenerationRequest, params: DistributedChatParams) -> Resumption | None:
        """The pipeline of an earlier turn, where all its shards are still there and would be chosen among."""
        if not params.settings.keeps_kv or request.prompt_logprobs is not None:
            return None
        now_s = time.monotonic()
        candidates = self._candidates(request, params.fallback_to_local, params.own_place)
        own = [Placed(self._node, "", stage) for stage in params.own_layers]
        fit = [c for c in candidates if self._is_reachable(c.node) and not self.store.is_suspect(c.node, now_s)]

        def is_usable(kept: Kept) -> bool:
            if params.pipeline and params.pipeline != kept.stages:
                return False
            is_own_kept = all(placed in kept.stages for placed in own)
            others = [placed for placed in kept.stages if placed not in own]
            return is_own_kept and len(kept.stages) <= params.max_shards_per_request and are_held(others, fit)

        found = self._kept.find(reuse_key(request, params.activation_dtype), request.prompt, now_s, is_usable)
        if found is None or found.is_most_of(request.prompt):
            return found
        # A little in common (a system prompt) is no reason to crowd where a conversation went before.
        usual = [(placed.node, placed.stage) for placed in self.pipeline_for(request, params)]
        return found if [(placed.node, placed.stage) for placed in found.kept.stages] == usual else None

    def pipeline_for(self, request: GenerationRequest, params: DistributedChatParams) -> list[Placed]:
        """The shards that a request would use. Raises ShardUnavailable with what is missing."""
        if params.pipeline:
            problem = check_tiling([placed.stage for placed in params.pipeline], request.layer_count)
            if problem is not None:
                raise BadRequest(problem)
            return list(params.pipeline)
        candidates = self._candidates(request, params.fallback_to_local, params.own_place)
        own = [Placed(self._node, "", stage, arithmetic=params.own_arithmetic) for stage in params.own_layers]
        reachable = [candidate for candidate in candidates if self._is_reachable(candidate.node)]
        rules = self._rules(request, params)
        placed = pick_pipeline(reachable, own, request.layer_count, rules)
        placed = placed or pick_pipeline(candidates, own, request.layer_count, rules)
        if placed is None:
            raise self._why_not(request, params, candidates, own)
        return placed

    def _why_not(
        self, request: GenerationRequest, params: DistributedChatParams, candidates: list[Candidate], own: list[Placed]
    ) -> PotluckError:
        """Which rule stood in the way, where it was not a missing layer."""
        cover = cover_around(candidates, own, request.layer_count)
        if cover is None:
            return self.store.gap(
                request.model, request.weights_sha256, request.layer_count, allows_own=params.allows_own
            )
        if len(cover) > params.max_shards_per_request:
            return ShardUnavailable(
                f"{len(cover)} shards would be needed; at most {params.max_shards_per_request} may be used"
            )
        return ShardsFull(f"every holder of some layers of {request.model} has as many streams as it takes")

    def _rules(self, request: GenerationRequest, params: DistributedChatParams) -> RouteRules:
        return RouteRules(
            max_shards=params.max_shards_per_request, own=self._node, allows_own_first=True, links=self.measured_links,
            activation_bytes=4 * request.hidden_size,
        )  # fmt: skip

    def _is_reachable(self, node: bytes) -> bool:
        return node == self._node or self._links.is_linked(node)

    def _candidates(
        self, request: GenerationRequest, allows_local: bool, own: Literal["last", "equal", "first"] = "last"
    ) -> list[Candidate]:
        now_s = time.monotonic()
        allows_own = allows_local or own == "equal"
        return self.store.candidates(request.weights_sha256, None, allows_own, now_s, own)

    def _generation(self, request: GenerationRequest, params: DistributedChatParams) -> Generation:
        def repick(
            kept: Sequence[Placed | None], excluded: frozenset[bytes], allows_local: bool
        ) -> list[list[Placed]] | None:
            # Where others have failed too often it is this node's turn.
            is_own_turn = allows_local and params.fallback_to_local
            offered = self._candidates(request, is_own_turn, "first" if is_own_turn else "last")
            if params.own_layers:
                offered = between_own(offered, [Placed(self._node, "", stage) for stage in params.own_layers])
            reachable = [candidate for candidate in offered if self._is_reachable(candidate.node)]
            rules = self._rules(request, params)
            return replacer.replacements(kept, reachable, excluded, request.layer_count, rules)

        resumption = self._resumption(request, params)
        if resumption is None:
            pipeline: Sequence[Placed] = self.pipeline_for(request, params)
            request = _rounded(request, pipeline, params.activation_dtype, self.measured_links)
        else:
            pipeline = resumption.kept.stages
            request = msgspec.structs.replace(request, boundaries=resumption.kept.boundaries)
        replacer = Replacer(pipeline)
        generation = Generation(
            request, pipeline, repick, params.settings, lambda: os.urandom(16), self._node, resumption
        )
        if params.on_timing is not None:
            generation.on_timing = params.on_timing
        return generation

    def on_message(self, sender: bytes, session: bytes, message: Message, body: bytes = b"") -> bool:
        """Whether a generation knows that session."""
        for running in self._running:
            if session in running.generation.sessions:
                if isinstance(message, Opened):
                    self.store.clear_suspicion(sender)  # it works
                running.generation.on_message(sender, message, time.monotonic(), body)
                self._carry_out(running)
                return True
        return False

    def on_suspect(self, node: bytes) -> None:
        """The head of a pipeline that this node has a part in has found that node lost."""
        self.store.suspect(node, time.monotonic())

    def on_lost(self, node: bytes, reason: str) -> None:
        self._kept.forget(node)
        for (asked, _), answer in self._answers.items():
            if asked == node and not answer.done():
                answer.set_exception(LinkClosed(f"{node.hex()[:8]} was lost before it answered: {reason}"))
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
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)


def _rounded(
    request: GenerationRequest, pipeline: Sequence[Placed], dtype: Codec | Literal["auto"], links: Links | None
) -> GenerationRequest:
    """With a boundary wherever activations go over to another stage and are rounded there. `auto` does so on slow links only."""
    if request.boundaries:
        return request
    edges = [(after.stage.start, _codec(before, after, dtype, links)) for before, after in itertools.pairwise(pipeline)]
    lossy = tuple(Boundary(layer, codec) for layer, codec in edges if codec != "fp32")
    return msgspec.structs.replace(request, boundaries=lossy)


def _codec(before: Placed, after: Placed, dtype: Codec | Literal["auto"], links: Links | None) -> Codec:
    if dtype != "auto":
        return dtype
    is_slow = links is not None and links.hop_s(before.node, after.node, 0) >= _SLOW_HOP_S
    return "fp16" if is_slow else "fp32"
