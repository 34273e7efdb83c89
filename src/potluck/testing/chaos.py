"""Real processes, killed or stopped in the middle of an answer: a swarm on loopback, a head in this process, blows drawn from a seed.

What is compared is tokens. Who was hit is set on its feet again between runs. Knows pids only of processes that its swarm started.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from potluck.core.errors import BenchmarkFailed, PotluckError
from potluck.core.grammar import Grammar
from potluck.core.sampling_params import SamplingParams
from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.tls import TlsTransport
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.orchestrator.frames import PipelineAborted, PromptLogprobs, ShardFailover, ShardStatus, TokenDelta
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.testing.local_swarm import LocalNode, LocalSwarm
from potluck.wire.messages import Codec, Describe, Described

Moment = Literal["prefill", "decode", "recovery"]
Target = Literal["worker", "daemon"]
How = Literal["kill", "stop"]
_When = Literal["recovery", "at once"]
_Card = TypeVar("_Card")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_HEALED_WITHIN_S = 60.0
_LOOK_S = 0.05


class Configuration(msgspec.Struct, frozen=True):
    """One way to ask; each has a reference of its own."""

    temperature: float
    uses_ring: bool
    codec: Codec
    grammar: Grammar | None = None
    logprobs: int | None = None  # of the prompt's tokens and of those that are chosen

    def __str__(self) -> str:
        how = "greedy" if self.temperature == 0 else "sampled"
        held = "" if self.grammar is None else f", {self.grammar.kind}"
        return f"{how}, {'ring' if self.uses_ring else 'no ring'}, {self.codec}{held}"


CONFIGURATIONS = tuple(
    Configuration(temperature, uses_ring, codec)
    for temperature in (0.0, 0.8)
    for uses_ring in (True, False)
    for codec in ("fp32", "int8")
)


class Blow(msgspec.Struct, frozen=True):
    """Who is hit, how and when. `place` counts stages of the pipeline as it is then; `at` is a share of the prefill or answer."""

    moment: Moment
    place: int
    target: Target
    how: How
    at: float

    @property
    def kind(self) -> str:
        return f"{self.how} {self.target}, {self.moment}"


@dataclass
class RunOutcome:
    """What came of one answer. `struck`: blows that found somebody; one meant for a recovery may not."""

    said: list[TokenDelta | PromptLogprobs] = field(default_factory=list)  # what must be the same every time
    pauses_ms: list[float] = field(default_factory=list)
    struck: list[Blow] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    aborted: str = ""

    @property
    def tokens(self) -> list[int]:
        return [frame.token for frame in self.said if isinstance(frame, TokenDelta)]

    def has_felt(self, blows: Sequence[Blow]) -> bool:
        """Whether each of them struck in its moment, and the answer did not end before somebody was missed."""
        return set(self.struck) == set(blows) and bool(self.lost)


# ---------------------------------------------------------------- dealing: few runs, and yet something of everything

_TARGETS: tuple[Target, ...] = ("worker", "daemon")
_HOW: tuple[How, ...] = ("kill", "stop")
_MOMENTS: tuple[Moment, ...] = ("prefill", "decode")
_FIRST = tuple(
    (moment, target, how)
    for moment in _MOMENTS
    for target in _TARGETS
    for how in (*_HOW, "kill")  # what is stopped takes longest to be missed
)
_WHEN: tuple[_When, ...] = ("recovery", "at once")
_SECOND = (*((when, target, how) for when in _WHEN for target in _TARGETS for how in _HOW), *[None] * 10)


class Hand(msgspec.Struct, frozen=True):
    """An answer to be disturbed: how it is asked for, who is hit and when."""

    configuration: Configuration
    blows: tuple[Blow, ...]

    def earlier(self) -> "Hand":
        """The same, sooner: for an answer that was over before it felt all blows."""
        sooner = tuple(msgspec.structs.replace(blow, at=blow.at / 2) for blow in self.blows)
        return msgspec.structs.replace(self, blows=sooner)


def deal(
    draw: random.Random, counts: Mapping[int, int], configurations: Sequence[Configuration] = CONFIGURATIONS
) -> dict[int, list[Hand]]:
    """As many hands for each number of shards as `counts` says, from shuffled decks; single draws would leave some kinds out.

    In 18 hands every kind of blow comes in every moment, and every configuration is asked for; in as many as a pipeline has
    stages, each of them is hit.
    """
    total = sum(counts.values())
    firsts, seconds = _dealt(draw, _FIRST, total), _dealt(draw, _SECOND, total)
    ways = _dealt(draw, configurations, total)
    hands: dict[int, list[Hand]] = {}
    for shards, count in counts.items():
        hands[shards] = []
        for place in _dealt(draw, range(shards), count):
            moment, target, how = next(firsts)
            first = Blow(moment, place, target, how, draw.random())
            hands[shards].append(Hand(next(ways), (first, *_after(draw, first, next(seconds), shards))))
    return hands


def _dealt(draw: random.Random, cards: Sequence[_Card], count: int) -> Iterator[_Card]:
    """Whole decks one after the other: each card comes as often as any other, to within one."""
    decks = [card for _ in range(0, count, len(cards)) for card in draw.sample(cards, len(cards))]
    return iter(decks[:count])


def _after(draw: random.Random, first: Blow, card: tuple[_When, Target, How] | None, stages: int) -> tuple[Blow, ...]:
    """The second blow, where there is one. It falls on another stage: who lies down already would not feel it."""
    if card is None:
        return ()
    when, target, how = card
    place = (first.place + 1 + draw.randrange(stages - 1)) % stages
    return (Blow(first.moment if when == "at once" else when, place, target, how, first.at),)


class ChaosHead:
    """A head on a swarm: references, disturbed runs, and healing in between."""

    def __init__(
        self, swarm: LocalSwarm, node: Node, model: RemoteModel, prompt: Sequence[int], max_tokens: int
    ) -> None:
        self.swarm, self.node, self.model = swarm, node, model
        self._prompt, self._max_tokens = tuple(prompt), max_tokens
        self._references: dict[Configuration, RunOutcome] = {}
        self._prefill_s = 0.05
        self._worker_pids: dict[bytes, int] = {}
        self._stopped: set[int] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def on(
        cls, swarm: LocalSwarm, model: str, prompt: Sequence[int], max_tokens: int
    ) -> AsyncIterator["ChaosHead"]:
        key = NodeKey.generate()
        node = Node(key, TlsTransport(key, admit_anyone))
        head: ChaosHead | None = None
        try:
            await node.orchestrator.connect(swarm.addresses)
            head = cls(swarm, node, await RemoteModel.find(node, model), prompt, max_tokens)
            yield head
        finally:
            if head is not None:
                head.wake_all()
            await node.stop()

    # ------------------------------------------------------------ asking

    def params(self, configuration: Configuration) -> DistributedChatParams:
        # Two blows can hit all who hold some layers; one of them comes back, a stopped worker after half a minute.
        settings = GenerationSettings(uses_ring=configuration.uses_ring, prefill_chunk=32, holder_wait_s=60.0)
        return DistributedChatParams(settings=settings)

    def request(self, configuration: Configuration) -> GenerationRequest:
        """The same for every run: an answer does not end before its last token, and boundaries are those of the whole pipeline."""
        sampling = SamplingParams(temperature=configuration.temperature, seed=20261115, logprobs=configuration.logprobs)
        plain = self.model.request(self._prompt, sampling, self._max_tokens)
        stages = self.node.orchestrator.pipeline_for(plain, self.params(configuration))
        edges = [placed.stage.start for placed in stages[1:]]
        request = self.model.request(
            self._prompt, sampling, self._max_tokens, configuration.codec, edges, grammar=configuration.grammar,
            prompt_logprobs=configuration.logprobs,
        )  # fmt: skip
        return msgspec.structs.replace(request, eos=())

    async def reference(self, configuration: Configuration) -> RunOutcome:
        """The undisturbed answer; asked for once."""
        if configuration not in self._references:
            loop = asyncio.get_running_loop()
            began, outcome = loop.time(), RunOutcome()
            async for frame in self.node.orchestrator.chat(self.request(configuration), self.params(configuration)):
                if isinstance(frame, TokenDelta | PromptLogprobs):
                    if not outcome.said:
                        self._prefill_s = loop.time() - began
                    outcome.said.append(frame)
                elif isinstance(frame, ShardStatus | PipelineAborted):
                    raise BenchmarkFailed(f"the undisturbed run was disturbed: {frame}")
            self._references[configuration] = outcome
        return self._references[configuration]

    async def disturbed(self, configuration: Configuration, blows: Sequence[Blow]) -> RunOutcome:
        """One answer under these blows."""
        outcome = RunOutcome()
        waiting = [blow for blow in blows if blow.moment != "prefill"]
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(blow.at * self._prefill_s, self._strike, blow, outcome)
            for blow in blows
            if blow.moment == "prefill"
        ]
        try:
            async for frame in self.node.orchestrator.chat(self.request(configuration), self.params(configuration)):
                if isinstance(frame, TokenDelta | PromptLogprobs):
                    outcome.said.append(frame)
                elif isinstance(frame, ShardStatus):
                    outcome.lost.append(frame.shard_id)
                elif isinstance(frame, ShardFailover):
                    outcome.pauses_ms.append(frame.pause_ms)
                elif isinstance(frame, PipelineAborted):
                    outcome.aborted = f"{frame.code}: {frame.message}"
                due = [blow for blow in waiting if self._is_due(blow, outcome)]
                for blow in due:
                    waiting.remove(blow)
                    self._strike(blow, outcome)
        finally:
            for timer in timers:
                timer.cancel()
        return outcome

    def _is_due(self, blow: Blow, outcome: RunOutcome) -> bool:
        if blow.moment == "recovery":
            return bool(outcome.lost)
        return len(outcome.tokens) >= 1 + int(blow.at * (self._max_tokens - 2))

    # ------------------------------------------------------------ hitting and healing

    def _strike(self, blow: Blow, outcome: RunOutcome) -> None:
        pipelines = self.node.orchestrator.pipelines
        if not pipelines:
            return
        stages = pipelines[-1]
        hit = stages[blow.place % len(stages)].node
        local = next(node for node in self.swarm.nodes if _id_of(node) == hit)
        pid = local.pid if blow.target == "daemon" else self._worker_pids.get(hit, 0)
        if not local.is_alive or not pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[blow.how])
            is_late = blow.moment == "prefill" and bool(outcome.tokens)  # prompts are read sooner one time than another
            outcome.struck.append(msgspec.structs.replace(blow, moment="decode") if is_late else blow)
            if blow.how == "stop":
                self._stopped.add(pid)

    def wake_all(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    async def heal(self) -> None:
        """Everybody lives, is loaded, can be reached and has no session left. Raises BenchmarkFailed where that takes too long."""
        self.wake_all()
        dead = [node for node in self.swarm.nodes if not node.is_alive]
        for node in [self.swarm.restart(node) for node in dead]:
            await asyncio.to_thread(node.wait_until_serving, _HEALED_WITHIN_S)
        deadline = asyncio.get_running_loop().time() + _HEALED_WITHIN_S
        for node in self.swarm.nodes:
            while not await self._is_well(node):
                if asyncio.get_running_loop().time() > deadline:
                    raise BenchmarkFailed(f"{node.plan} did not recover within {_HEALED_WITHIN_S:.0f} s")
                await asyncio.sleep(_LOOK_S)

    async def _is_well(self, node: LocalNode) -> bool:
        answer = await self.describe(node)
        if answer is None or not all(info.is_loaded and info.streams == 0 for info in answer.shards):
            return False
        self._worker_pids[answer.node] = answer.worker_pids[0]
        return True

    async def describe(self, node: LocalNode) -> Described | None:
        """What a node says of itself; None where it cannot be reached."""
        if not self.node.links.is_linked(_id_of(node)):
            return None  # the orchestrator is trying
        try:
            answer, _ = await self.node.orchestrator.ask(_id_of(node), Describe)
        except (PotluckError, TimeoutError):
            return None
        return answer if isinstance(answer, Described) else None


def _id_of(node: LocalNode) -> bytes:
    assert node.announcement is not None
    return bytes.fromhex(node.announcement.node)
