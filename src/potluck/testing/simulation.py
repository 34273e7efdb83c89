"""A swarm in one thread on a fake clock: the real deciding code of heads and shards, a simulated network, and workers that hash.

Everything that happens is drawn from one seed: several heads on the same shards, kills, restarts, freezes, partitions, broken and slow
links, late and doubled frames, cancellations, slow readers. A run ends with each head's text, and with what was left behind (sessions,
KV, outbox bytes), which must be nothing. `python -m potluck.testing.simulation SEED` repeats a seed and tells what happened in it.
"""

import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, StreamFrame, TokenDelta
from potluck.orchestrator.generation import Generation, GenerationRequest, GenerationSettings
from potluck.orchestrator.routing import replace_gaps
from potluck.planner.cover import Candidate, greedy_cover
from potluck.shard.core import ShardCore, ShardSettings
from potluck.testing.hash_model import VOCABULARY, HashSession, row_bytes, run_item, undisturbed
from potluck.wire.effects import SendTo
from potluck.wire.messages import Boundary, Message, Sampler, Stage
from potluck.wire.work import (
    BatchDone,
    CloseSession,
    FromWorker,
    Load,
    Loaded,
    OpenSession,
    RunBatch,
    SessionOpened,
    ToWorker,
    TruncateSession,
    Unload,
)

MODEL, WEIGHTS, ARITHMETIC = "hash", "0" * 64, 1


class Clock:
    """Time that passes only from one event to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def run(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Until `is_done`, or nothing is left, or `limit_s` has passed. Whether it was done."""
        while self._events and not is_done():
            when, _, action = heapq.heappop(self._events)
            if when > limit_s:
                return False
            self.now_s = when
            action()
        return is_done()


class Sleeper:
    """Does things in the order in which they came, but none while it is frozen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._todo: deque[Callable[[], None]] = deque()
        self.frozen_until_s = 0.0

    @property
    def is_frozen(self) -> bool:
        return self._clock.now_s < self.frozen_until_s

    def do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        self._wake()

    def _wake(self) -> None:
        if self.is_frozen:
            self._clock.at(self.frozen_until_s, self._wake)
            return
        while self._todo and not self.is_frozen:
            self._todo.popleft()()


class SimWorker:
    """Hash sessions behind the worker protocol; computing takes simulated time."""

    def __init__(self, clock: Clock, tell: Callable[[FromWorker, bytes], None], speed: float) -> None:
        self._clock, self._tell, self._speed = clock, tell, speed
        self.sessions: dict[bytes, HashSession] = {}
        self.is_alive = True
        self.sleeper = Sleeper(clock)
        self.sign_of_life_s = 0.0
        self._free_at_s = 0.0

    def do(self, message: ToWorker, body: bytes) -> None:
        """In order, each after what came before it."""
        tokens = sum(item.count for item in message.items) if isinstance(message, RunBatch) else 0
        cost = 0.05 if isinstance(message, Load) else self._speed * (1 + 0.1 * tokens) if tokens else 0.0
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + cost
        self._clock.at(self._free_at_s, lambda: self.sleeper.do(lambda: self._finish(message, body)))

    def _finish(self, message: ToWorker, body: bytes) -> None:
        if not self.is_alive:
            return
        self.sign_of_life_s = self._clock.now_s
        answer = self._answer(message, body)
        if answer is not None:
            self._tell(*answer)

    def _answer(self, message: ToWorker, body: bytes) -> tuple[FromWorker, bytes] | None:
        if isinstance(message, Load):
            return Loaded(message.stage, 0, 0, int(self._speed * 1e6)), b""
        if isinstance(message, OpenSession):
            self.sessions[message.session] = HashSession(message.stage, message.boundaries, message.sampler)
            return SessionOpened(message.session), b""
        if isinstance(message, TruncateSession):
            if message.session in self.sessions:
                self.sessions[message.session].truncate(message.length, message.sampler)
        elif isinstance(message, CloseSession):
            self.sessions.pop(message.session, None)
        elif isinstance(message, RunBatch):
            return self._batch(message, body)
        return None

    def _batch(self, message: RunBatch, body: bytes) -> tuple[FromWorker, bytes]:
        outputs, bodies, offset = [], [], 0
        for item in message.items:
            output, row = run_item(self.sessions[item.session], item, body[offset : offset + item.size_bytes])
            offset += item.size_bytes
            outputs.append(output)
            bodies.append(row)
        return BatchDone(message.batch, tuple(outputs), 100), b"".join(bodies)


class SimShard:
    """A node that serves one shard: core, worker, and what can happen to them."""

    def __init__(self, world: "World", node: bytes, stage: Stage, layers: int, speed: float, keeps: int) -> None:
        self.world, self.node, self.stage, self.speed = world, node, stage, speed
        settings = ShardSettings(
            model=MODEL, weights_sha256=WEIGHTS, arithmetic=ARITHMETIC, layer_count=layers, hidden_size=1, stage=stage,
            outbox_budget_bytes=keeps, replay_rows=8,
        )  # fmt: skip
        self.core = ShardCore(node, settings, row_bytes)
        self.worker: SimWorker | None = None
        self.is_alive = True
        self.sleeper = Sleeper(world.clock)
        self.core.load()
        self.carry_out()

    def _start_worker(self) -> None:
        if not self.is_alive or self.worker is not None:
            return
        worker = SimWorker(self.world.clock, lambda message, body: self._heard(worker, message, body), self.speed)
        worker.sign_of_life_s = self.world.clock.now_s
        self.worker = worker
        worker.do(Load(self.stage), b"")

    def _heard(self, worker: SimWorker, message: FromWorker, body: bytes) -> None:
        def act() -> None:
            if self.is_alive and self.worker is worker:
                self.core.on_worker_message(message, body, self.world.clock.now_s)
                self.carry_out()

        self.sleeper.do(act)

    def receive(self, sender: bytes, message: Message, body: bytes) -> None:
        def act() -> None:
            if self.is_alive:
                self.core.on_message(sender, message, body, self.world.clock.now_s, self._worker_idle_us())
                self.carry_out()

        self.sleeper.do(act)

    def _worker_idle_us(self) -> int:
        """Pings go out while work is owed; a live worker answers them at once."""
        worker = self.worker
        if worker is None or not self.core.is_working:
            return 0
        silent_s = self.world.clock.now_s - worker.sign_of_life_s
        return int(silent_s * 1e6) if worker.sleeper.is_frozen else 0

    def lost(self, node: bytes) -> None:
        def act() -> None:
            if self.is_alive:
                self.core.on_node_lost(node, self.world.clock.now_s)
                self.carry_out()

        self.sleeper.do(act)

    def carry_out(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, SendTo):
                self.world.send(self.node, effect)
            elif isinstance(effect.message, Load):
                self._start_worker()
            elif self.worker is not None:
                self.worker.do(effect.message, effect.body)

    def kill(self) -> None:
        self.is_alive = False
        if self.worker is not None:
            self.worker.is_alive = False
        self.world.gone(self.node)

    def kill_worker(self) -> None:
        if not self.is_alive or self.worker is None:
            return
        self.worker.is_alive = False
        self.worker = None

        def act() -> None:
            if self.is_alive:
                self.core.on_worker_lost("killed")
                self.carry_out()
                self.world.clock.after(0.2, self._start_worker)

        self.sleeper.do(act)


@dataclass
class SimHead:
    """A generation and its reader."""

    world: "World"
    node: bytes
    generation: Generation
    reads_after_s: float = 0.0
    frames: list[StreamFrame] = field(default_factory=list)
    _wakes_at_s: float = float("inf")

    def start(self) -> None:
        self.generation.start(self.world.clock.now_s)
        self.carry_out()

    def receive(self, sender: bytes, message: Message, body: bytes) -> None:
        self.generation.on_message(sender, message, self.world.clock.now_s)
        self.carry_out()

    def lost(self, node: bytes) -> None:
        self.generation.on_lost(node, "reset", self.world.clock.now_s)
        self.carry_out()

    def carry_out(self) -> None:
        for effect in self.generation.take_effects():
            self.world.send(self.node, effect)
        new = self.generation.take_frames()
        self.frames += new
        count = sum(isinstance(frame, TokenDelta) for frame in new)
        if count:
            self.world.clock.after(self.reads_after_s * count, lambda: self._read(count))
        self._schedule()

    def _read(self, count: int) -> None:
        self.generation.consumed(count, self.world.clock.now_s)
        self.carry_out()

    def _schedule(self) -> None:
        if self.generation.is_ended:
            return
        wake = max(self.generation.next_wake_s(), self.world.clock.now_s + 0.001)
        if wake < self._wakes_at_s or self._wakes_at_s <= self.world.clock.now_s:
            self._wakes_at_s = wake
            self.world.clock.at(wake, self._wake)

    def _wake(self) -> None:
        self._wakes_at_s = float("inf")
        self.generation.on_time(self.world.clock.now_s)
        self.carry_out()


class World:
    """Nodes and the links between them. A link keeps the order of what it carries, unless the seed says that a frame is doubled."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.shards: dict[bytes, SimShard] = {}
        self.heads: dict[bytes, SimHead] = {}
        self.delay_s = 0.0005
        self.doubles = 0.0
        self._arrival_s: dict[tuple[bytes, bytes], float] = {}
        self._slow: dict[tuple[bytes, bytes], float] = {}
        self._cut: dict[frozenset[bytes], float] = {}
        self._broken: set[frozenset[bytes]] = set()

    def send(self, sender: bytes, effect: SendTo) -> None:
        target = self.shards.get(effect.node) or self.heads.get(effect.node)
        pair = (sender, effect.node)
        if target is None or (isinstance(target, SimShard) and not target.is_alive):
            self.clock.after(self.delay_s, lambda: self._tell_lost(sender, effect.node))
            return
        arrival = self.clock.now_s + self.delay_s * self.random.uniform(0.5, 2.0) + self._slow.get(pair, 0.0)
        healed = self._cut.get(frozenset(pair), 0.0)
        arrival = max(arrival, healed, self._arrival_s.get(pair, 0.0))
        self._arrival_s[pair] = arrival
        self.clock.at(arrival, lambda: target.receive(sender, effect.message, effect.body))
        if self.random.random() < self.doubles:
            late = arrival + self.random.uniform(0.0, 0.3)
            self.clock.at(late, lambda: target.receive(sender, effect.message, effect.body))

    def _tell_lost(self, node: bytes, lost: bytes) -> None:
        party = self.shards.get(node) or self.heads.get(node)
        if party is not None:
            party.lost(lost)

    def gone(self, node: bytes) -> None:
        """The system closes a dead process's connections: everybody learns within a millisecond."""
        for other in [*self.shards, *self.heads]:
            if other != node:
                self.clock.after(self.delay_s, lambda other=other: self._tell_lost(other, node))  # type: ignore[misc]

    def break_link(self, a: bytes, b: bytes) -> None:
        self._tell_lost(a, b)
        self._tell_lost(b, a)

    def cut_link(self, a: bytes, b: bytes, seconds: float) -> None:
        """Nothing arrives until it heals; what was sent arrives late."""
        self._cut[frozenset((a, b))] = self.clock.now_s + seconds

    def slow_link(self, a: bytes, b: bytes, seconds: float) -> None:
        self._slow[a, b] = seconds


def _node(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class Outcome:
    """What a seed came to. `problem` is empty where all promises were kept."""

    seed: int
    problem: str
    generated: list[int]
    failovers: int
    faults: list[str]
    longest_pause_s: float


@dataclass
class Scenario:
    """One seed's swarm and request, before anything goes wrong."""

    world: World
    layers: int
    head: SimHead
    expected: list[int]
    candidates: list[Candidate]


def build(seed: int, settings: GenerationSettings | None = None) -> Scenario:
    """Two to four stages, one or two spares for each range, some of them wider or narrower than what they replace."""
    world = World(seed)
    draw = world.random
    layers = draw.randint(4, 8)
    edges = sorted(draw.sample(range(1, layers), draw.randint(1, 3)))
    bounds = [0, *edges, layers]
    stages = [(lo, hi) for lo, hi in itertools.pairwise(bounds)]
    offered = list(stages)
    for lo, hi in stages:
        offered.append((max(0, lo - draw.randint(0, 1)), min(layers, hi + draw.randint(0, 1))))
        if hi - lo > 1 and draw.random() < 0.5:
            middle = draw.randint(lo + 1, hi - 1)
            offered += [(lo, middle), (middle, hi)]
    offered.append((0, layers))
    keeps = draw.choice([1 << 20, 1 << 20, 1 << 20, 64])
    candidates = []
    for number, (lo, hi) in enumerate(offered, start=1):
        stage = Stage(lo, hi, lo == 0, hi == layers)
        shard = SimShard(world, _node(number), stage, layers, draw.uniform(0.0005, 0.003), keeps)
        world.shards[shard.node] = shard
        candidates.append(Candidate(shard.node, f"sim:{number}", stage, 0 if number <= len(stages) else 1))
    return _with_request(world, layers, candidates, settings)


def _with_request(
    world: World, layers: int, candidates: list[Candidate], settings: GenerationSettings | None
) -> Scenario:
    draw = world.random
    prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30)))
    count = draw.randint(4, 24)
    boundaries = tuple(
        Boundary(layer, draw.choice(["fp16", "int8"])) for layer in range(1, layers) if draw.random() < 0.2
    )
    params = SamplingParams(temperature=1.0, seed=draw.randrange(1 << 32))
    eos = (draw.randrange(VOCABULARY),)
    request = GenerationRequest(
        model=MODEL, weights_sha256=WEIGHTS, arithmetic=ARITHMETIC, layer_count=layers, prompt=prompt, max_tokens=count,
        params=params, eos=eos, boundaries=boundaries,
    )  # fmt: skip
    settings = settings or GenerationSettings(
        prefill_chunk=draw.choice([1, 4, 16]), prefill_window=draw.choice([1, 2, 4]), uses_ring=draw.random() < 0.5,
        ring_credits=draw.choice([1, 4, 16]), keeps_outbox=draw.random() < 0.8, holder_wait_s=30.0, stall_timeout_s=5.0,
    )  # fmt: skip
    whole = Stage(0, layers, True, True)
    pipeline = greedy_cover(candidates, whole)
    assert pipeline is not None
    repick = lambda kept, excluded, local: replace_gaps(  # noqa: E731
        kept, [c for c in candidates if world.shards[c.node].is_alive], excluded, layers
    )
    ids = (world.random.randbytes(16) for _ in itertools.count())
    generation = Generation(request, pipeline, repick, settings, lambda: next(ids), _node(0))
    head = SimHead(world, _node(0), generation, draw.choice([0.0, 0.0, 0.002]))
    world.heads[head.node] = head
    limit = len(prompt) + count
    sampler = Sampler(params, 0, len(prompt), prompt, eos, limit)
    return Scenario(world, layers, head, undisturbed(prompt, layers, count, sampler, boundaries, eos), candidates)


def schedule_faults(scenario: Scenario, most: int) -> list[str]:
    """Draws up to `most` faults over the time that the answer takes; leaves the widest spare alone, so that it can be finished."""
    world, draw = scenario.world, scenario.world.random
    victims = [candidate.node for candidate in scenario.candidates[:-1]]
    faults: list[str] = []
    used = [placed.node for placed in scenario.head.generation.stages if placed.node in victims]
    when = draw.uniform(0.09, 0.25)
    for _ in range(draw.randint(0, most)):
        # Often right after the fault before: while the pipeline is being put together again.
        when = when + draw.uniform(0.0, 0.02) if draw.random() < 0.5 else draw.uniform(0.0, 0.3)
        victim = draw.choice(used if used and draw.random() < 0.6 else victims)
        kind = draw.choice(["kill", "worker", "freeze", "freeze_worker", "cut", "break", "slow", "doubles"])
        faults.append(f"{kind} {int.from_bytes(victim, 'big')} at {when:.4f}")
        world.clock.at(when, _fault(scenario, kind, victim, draw.uniform(0.05, 3.0), draw.choice(victims)))
    return faults


def _fault(scenario: Scenario, kind: str, victim: bytes, seconds: float, other: bytes) -> Callable[[], None]:
    world = scenario.world
    shard = world.shards[victim]

    def act() -> None:
        now = world.clock.now_s
        if kind == "kill":
            shard.kill()
        elif kind == "worker":
            shard.kill_worker()
        elif kind == "freeze":
            shard.sleeper.frozen_until_s = now + seconds
        elif kind == "freeze_worker" and shard.worker is not None:
            shard.worker.sign_of_life_s = now
            shard.worker.sleeper.frozen_until_s = now + seconds
        elif kind == "cut":
            world.cut_link(victim, scenario.head.node if seconds > 1.5 else other, seconds)
        elif kind == "break":
            world.break_link(victim, other)
        elif kind == "slow":
            world.slow_link(victim, other, seconds / 100)
        elif kind == "doubles":
            world.doubles = 0.2

    return act


def run_seed(seed: int, most_faults: int = 3) -> Outcome:
    """One seed, start to end."""
    scenario = build(seed)
    faults = schedule_faults(scenario, most_faults)
    world, generation = scenario.world, scenario.head.generation
    world.clock.at(0.1, scenario.head.start)
    is_done = world.clock.run(lambda: generation.is_ended, 300.0)
    # Let closes arrive and frozen nodes wake up, then look at what is left.
    world.clock.run(lambda: False, world.clock.now_s + 10.0)
    problem = "" if is_done else f"no end after 300 s: {generation!r}"
    problem = problem or _verdict(scenario)
    pauses = [frame.pause_ms / 1000 for frame in scenario.head.frames if isinstance(frame, ShardFailover)]
    return Outcome(seed, problem, generation.generated, generation.failovers, faults, max(pauses, default=0.0))


def _verdict(scenario: Scenario) -> str:
    generation = scenario.head.generation
    if generation.generated != scenario.expected:
        return f"text differs: {generation.generated} instead of {scenario.expected} ({scenario.head.frames[-1]})"
    if not isinstance(scenario.head.frames[-1], Finished | PipelineAborted):
        return "the last frame is not an end"
    for shard in scenario.world.shards.values():
        if shard.is_alive and (shard.core.session_count or shard.core.outbox_bytes):
            return f"left behind on {int.from_bytes(shard.node, 'big')}: {shard.core!r}"
        if shard.is_alive and shard.worker is not None and shard.worker.sessions:
            return f"KV left behind on {int.from_bytes(shard.node, 'big')}"
    return ""


def run_seeds(seeds: Sequence[int], most_faults: int = 3) -> list[Outcome]:
    return [run_seed(seed, most_faults) for seed in seeds]
