"""The parts of a simulated swarm, in one thread on a fake clock: the real deciding code of heads and shards, a network whose links
delay, hold back and lose what they carry, and workers that hash. What happens to them is decided elsewhere.

What is said travels as bytes, in the frames of real links and of real workers' streams.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.core.remembered import RememberedAnswers
from potluck.orchestrator.frames import StreamFrame, TokenDelta
from potluck.orchestrator.generation import Generation
from potluck.shard.ahead import Ahead
from potluck.shard.core import Remember, ShardCore, Suspect, Work
from potluck.shard.settings import ShardSettings
from potluck.testing.hash_model import HashSession, Undisturbed, row_bytes, run_item
from potluck.wire.channel import Channel
from potluck.wire.effects import SendTo
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.frames import message_stream
from potluck.wire.messages import Close, Fault, Message, Open, Stage
from potluck.wire.work import (
    BatchDone,
    CloseSession,
    FromWorker,
    Load,
    Loaded,
    OpenSession,
    ParkSession,
    RunBatch,
    SessionOpened,
    SessionRefused,
    ToWorker,
    TruncateSession,
    Unload,
)
from potluck.wire.work_frames import Buffer, encode, from_worker_decoder, to_worker_decoder

MODEL, WEIGHTS, ARITHMETIC = "hash", "0" * 64, 1
_MOST_FRAMES_BYTES = 1 << 20


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
            if self._events[0][0] > limit_s:
                return False
            self.now_s, _, action = heapq.heappop(self._events)
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
        self.parked: dict[bytes | None, HashSession] = {}
        self.is_alive = True
        self.sleeper = Sleeper(clock)
        self.sign_of_life_s = 0.0
        self.full_until_s = 0.0  # until then it has no memory for another session
        self._orders, self._answers = to_worker_decoder(), from_worker_decoder()
        self._free_at_s = 0.0

    def do(self, message: ToWorker, body: bytes) -> None:
        """In order, each after what came before it."""
        self.take(b"".join(encode(message, body)))

    def take(self, frame: bytes) -> None:
        [(message, body)] = self._orders.feed(frame)
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
            [(answered, data)] = self._answers.feed(b"".join(encode(*answer)))
            self._tell(answered, data)

    def _answer(self, message: ToWorker, body: bytes) -> tuple[FromWorker, bytes] | None:
        if isinstance(message, Load):
            return Loaded(message.stage, 0, 0, int(self._speed * 1e6)), b""
        if isinstance(message, OpenSession):
            if self._clock.now_s < self.full_until_s:
                return SessionRefused(message.session, "out_of_kv_memory", "no room"), b""
            session = HashSession(message.stage, message.boundaries, message.sampler)
            if message.resumes in self.parked:
                session.resume(self.parked[message.resumes], message.resumed)
            self.sessions[message.session] = session
            return SessionOpened(message.session, session.length), b""
        if isinstance(message, TruncateSession):
            if message.session in self.sessions:
                self.sessions[message.session].truncate(message.length, message.sampler)
        elif isinstance(message, ParkSession):
            self.parked[message.session] = self.sessions.pop(message.session)
            self.parked[message.session].truncate(message.length, None)
        elif isinstance(message, CloseSession):
            self.sessions.pop(message.session, None)
            self.parked.pop(message.session, None)
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


@dataclass(frozen=True)
class ShardPlan:
    """What one simulated node serves. `core` may be a broken variant, to see whether a run notices."""

    node: bytes
    stage: Stage
    layers: int
    speed_s: float
    outbox_bytes: int = 1 << 20
    streams: int = 16
    is_loaded: bool = True
    eviction_idle_s: float = 600.0
    core: type[ShardCore] = ShardCore


class SimShard:
    """A node that serves one shard: core, worker, and what can happen to them."""

    def __init__(self, world: "World", plan: ShardPlan) -> None:
        self.world, self.plan, self.node, self.stage, self.speed = world, plan, plan.node, plan.stage, plan.speed_s
        settings = ShardSettings(
            model=MODEL, weights_sha256=WEIGHTS, arithmetic=ARITHMETIC, layer_count=plan.layers, hidden_size=1, stage=plan.stage,
            max_concurrent_streams=plan.streams, outbox_budget_bytes=plan.outbox_bytes, replay_rows=8,
            eviction_idle_s=plan.eviction_idle_s,
        )  # fmt: skip
        self.core = plan.core(plan.node, settings, row_bytes)
        self._ahead = Ahead(self.core, self, self, self._contradicted)
        self._foreseen: dict[bytes, tuple[ForeseenStep, Callable[[bytes], None]]] = {}  # by who is to send it
        self.worker: SimWorker | None = None
        self.suspects: list[bytes] = []  # whom heads have called lost
        self.is_alive = True
        self.sleeper = Sleeper(world.clock)
        if plan.is_loaded:
            self.core.load()
        self.carry_out()

    def __repr__(self) -> str:
        return f"<SimShard {int.from_bytes(self.node, 'big')} {self.core!r}>"

    @property
    def leftovers(self) -> str:
        """What it still keeps; empty where it is as if nothing had been."""
        if not self.is_alive:
            return ""
        if self.core.session_count or self.core.outbox_bytes or self.core.state.queue_depth:
            return f"{self.core!r}, {self.core.outbox_bytes} outbox bytes, {self.core.state}"
        if self.worker is not None and (self.worker.sessions or self.worker.parked):
            return f"KV of {len(self.worker.sessions)} sessions and of {len(self.worker.parked)} that are parked"
        return ""

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
                if isinstance(message, BatchDone):
                    self._ahead.on_answer(message, body, self.world.clock.now_s)
                self.core.on_worker_message(message, body, self.world.clock.now_s)
                self.carry_out()

        self.sleeper.do(act)

    def receive(self, sender: bytes, message: Message, body: bytes, frames: bytes) -> None:
        """`frames`: as it came."""

        def act() -> None:
            if self.is_alive:
                self._look_at(sender, frames)
                self.core.on_message(sender, message, body, self.world.clock.now_s, self._worker_idle_us())
                self.carry_out()
                if self.core.has_batch_to_start:
                    self.world.clock.after(0.0, lambda: self.sleeper.do(start))

        def start() -> None:
            if self.is_alive:
                self.core.start_batch()
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
        left, effects = self._ahead.take_effects()
        if isinstance(left, Work):
            self._rehearse_now_and_then(left.message)
        for effect in effects:
            if isinstance(effect, SendTo):
                self.world.send(self.node, effect)
            elif isinstance(effect, Suspect):
                self.suspects.append(effect.node)
            elif isinstance(effect, Remember):
                self.world.remembered.put(effect.key, effect.answer, self.world.clock.now_s)
            elif isinstance(effect.message, Load):
                self._start_worker()
            elif isinstance(effect.message, Unload):
                self._retire_worker()
            elif self.worker is not None:
                self.worker.do(effect.message, effect.body)
                self._rehearse_now_and_then(effect.message)
        if self.core.session_count == 1:
            self.world.clock.after(0.0, lambda: self.sleeper.do(self._ahead.look))

    def _rehearse_now_and_then(self, message: ToWorker) -> None:
        """Early, late or in time: nothing may come of it."""
        if not isinstance(message, RunBatch) or self.world.random.random() >= 0.3:
            return

        def act() -> None:
            if self.is_alive:
                self.core.rehearsals.send(message.batch)
                self.carry_out()

        self.world.clock.after(self.world.random.uniform(0.0, 2 * self.speed), lambda: self.sleeper.do(act))

    # ------------------------------------------------------------ what leaves before it is decided

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        self._foreseen[node] = step, on_arrival

    def _look_at(self, sender: bytes, frames: bytes) -> None:
        """As a link does: whatever comes from there, nothing is expected any more."""
        step, on_arrival = self._foreseen.pop(sender, (None, None))
        if step is not None and on_arrival is not None and (body := step.body_in(frames)) is not None:
            on_arrival(body)

    def send_batch(self, start: Buffer, body: bytes) -> bool:
        if self.worker is None:
            return False
        self.world.foreseen += 1
        self.worker.take(bytes(start) + body)
        return True

    def send_foreseen(self, node: bytes, step: ForeseenStep, spent: bytes, body: bytes) -> bool:
        if self.world.random.random() < 0.1:
            return False  # no link, at the moment
        self.world.foreseen += 1
        frame = step.frame(spent, body)
        [received] = Channel().receive(frame)
        self.world.send(self.node, SendTo(node, None, received.message, received.body), frame)
        return True

    def _contradicted(self) -> None:
        self.world.contradictions.append(f"what left {self!r} is not what was decided then")

    def _retire_worker(self) -> None:
        if self.worker is not None:
            self.worker.is_alive = False
        self.worker = None

    def keep_house(self) -> None:
        """What a node does every few seconds."""

        def act() -> None:
            if self.is_alive:
                self.core.give_up_silent(self.world.clock.now_s)
                self.core.evict_if_idle(self.world.clock.now_s)
                self.carry_out()

        self.sleeper.do(act)

    def accuse(self, accused: Callable[[bytes], bool]) -> None:
        """Lies: says of whoever feeds it, where `accused` agrees, that it sent rubbish."""
        for session in self.core.sessions if self.is_alive else ():
            previous = session.wiring.previous
            if previous is not None and accused(previous.node):
                fault = Fault(session.id, session.epoch, "shard_corruption", "a lie", previous.node)
                self.world.send(self.node, SendTo(session.head, None, fault))

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._retire_worker()
        self.world.gone(self.node)

    def kill_worker(self) -> None:
        if not self.is_alive or self.worker is None:
            return
        self._retire_worker()

        def act() -> None:
            if self.is_alive:
                self.core.on_worker_lost("killed")
                self.carry_out()
                self.world.clock.after(0.2, self._start_worker)

        self.sleeper.do(act)


@dataclass
class SimHead:
    """A generation and its reader, who may be slow, and may stop reading for a while."""

    world: "World"
    node: bytes
    generation: Generation
    expected: Undisturbed
    reads_after_s: float = 0.0
    pauses_at_s: float = float("inf")
    pause_s: float = 0.0
    ended_s: float | None = None
    frames: list[StreamFrame] = field(default_factory=list)
    is_alive: bool = True
    _wakes_at_s: float = float("inf")

    def __post_init__(self) -> None:
        self.sleeper = Sleeper(self.world.clock)

    @property
    def is_over(self) -> bool:
        return self.generation.is_ended or not self.is_alive

    def _do(self, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.is_alive:
                action()
                self.carry_out()

        self.sleeper.do(act)

    def kill(self) -> None:
        """Its process is gone in the middle of the answer; shards see their connections end."""
        if self.is_over:
            return
        self.is_alive = False
        self.ended_s = self.world.clock.now_s
        self.world.gone(self.node)
        self.world.on_ended(self)

    def start(self) -> None:
        self._do(lambda: self.generation.start(self.world.clock.now_s))

    def receive(self, sender: bytes, message: Message, body: bytes, frames: bytes) -> None:
        self._do(lambda: self.generation.on_message(sender, message, self.world.clock.now_s, body))

    def lost(self, node: bytes) -> None:
        self._do(lambda: self.generation.on_lost(node, "reset", self.world.clock.now_s))

    def carry_out(self) -> None:
        for effect in self.generation.take_effects():
            self.world.send(self.node, effect)
        new = self.generation.take_frames()
        self.frames += new
        count = sum(isinstance(frame, TokenDelta) for frame in new)
        if count:
            self.world.clock.after(self._reading_s() * count, lambda: self._read(count))
        if self.generation.is_ended and self.ended_s is None:
            self.ended_s = self.world.clock.now_s
            self.world.on_ended(self)
        self._schedule()

    def _reading_s(self) -> float:
        if self.world.clock.now_s < self.pauses_at_s:
            return self.reads_after_s
        pause, self.pauses_at_s = self.pause_s, float("inf")
        return pause

    def returned(self, node: bytes) -> None:
        self._do(lambda: self.generation.on_returned(node, self.world.clock.now_s))

    def cancel(self) -> None:
        self._do(self.generation.cancel)

    def _read(self, count: int) -> None:
        self._do(lambda: self.generation.consumed(count, self.world.clock.now_s))

    def _schedule(self) -> None:
        if self.generation.is_ended:
            return
        wake = max(self.generation.next_wake_s(), self.world.clock.now_s + 0.001)
        if wake < self._wakes_at_s or self._wakes_at_s <= self.world.clock.now_s:
            self._wakes_at_s = wake
            self.world.clock.at(wake, self._wake)

    def _wake(self) -> None:
        def act() -> None:
            self._wakes_at_s = float("inf")
            self.generation.on_time(self.world.clock.now_s)

        self._do(act)


class SimLink:
    """A connection of two nodes: frames in, messages out, at each end."""

    def __init__(self, a: bytes, b: bytes) -> None:
        self._ends = {a: Channel(), b: Channel()}
        self.is_broken = False

    def frames(self, sender: bytes, message: Message, body: bytes, frame: bytes | None = None) -> bytes:
        """All that goes over the wire for it; no model here is so large that it would need credit. `frame`: made beforehand."""
        writer = self._ends[sender].writer
        if frame is None:
            writer.push(message, body)
        else:
            writer.push_frame(message_stream(message), frame)
        taken = b"".join(writer.take(_MOST_FRAMES_BYTES))
        assert not writer.queued_bytes
        return taken

    def received(self, target: bytes, frames: bytes) -> tuple[Message, bytes]:
        [received] = self._ends[target].receive(frames)
        assert not received.chunks
        return received.message, received.body


class World:
    """Nodes and the links between them. A link keeps the order of what it carries, unless the seed says that a frame is doubled."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clock = Clock()
        self.foreseen = 0  # what left before it was decided
        self.contradictions: list[str] = []  # and was not what was decided then
        self.remembered = RememberedAnswers()  # by all shards together
        self.shards: dict[bytes, SimShard] = {}
        self.heads: dict[bytes, SimHead] = {}
        self.delay_s = 0.0005
        self.doubles = 0.0
        self.doubled_after_s = 0.3
        self.on_ended: Callable[[SimHead], None] = lambda head: None
        self.tell: Callable[[str], None] | None = None  # for a look at what happens
        self._arrival_s: dict[tuple[bytes, bytes], float] = {}
        self._slow: dict[tuple[bytes, bytes], float] = {}
        self.eavesdropper: bytes | None = None
        self._cut: dict[frozenset[bytes], float] = {}
        self._cut_one_way: dict[tuple[bytes, bytes], float] = {}
        self._links: dict[frozenset[bytes], SimLink] = {}

    def send(self, sender: bytes, effect: SendTo, frame: bytes | None = None) -> None:
        """`frame`: of that message, where it was made beforehand."""
        target = self.shards.get(effect.node) or self.heads.get(effect.node)
        pair, link = (sender, effect.node), frozenset((sender, effect.node))
        if self.tell is not None:
            self.tell(f"{_name(sender)} → {_name(effect.node)}: {str(effect.message)[:160]}")
        if target is None or not target.is_alive:
            self.clock.after(self.delay_s, lambda: self._tell_lost(sender, effect.node))
            return
        arrival = self.clock.now_s + self.delay_s * self.random.uniform(0.5, 2.0) + self._slow.get(pair, 0.0)
        arrival = max(
            arrival, self._cut.get(link, 0.0), self._cut_one_way.get(pair, 0.0), self._arrival_s.get(pair, 0.0)
        )
        self._arrival_s[pair] = arrival
        arrive = self._carry(sender, target, effect.message, effect.body, frame)
        self.clock.at(arrival, arrive)
        if self.eavesdropper is not None and not isinstance(effect.message, Open) and self.random.random() < 0.2:
            # A member that is no part of it repeats what it has seen, or orders an end, in its own name: it can sign for no other.
            rogue, when = self.eavesdropper, arrival + self.random.uniform(0.0, self.doubled_after_s)
            said, body = (
                (effect.message, effect.body)
                if self.random.random() < 0.5
                else (Close(getattr(effect.message, "session", bytes(16))), b"")
            )
            self.clock.at(when, self._carry(rogue, target, said, body))
        if self.random.random() < self.doubles:
            self.clock.at(arrival + self.random.uniform(0.0, self.doubled_after_s), arrive)

    def _carry(
        self, sender: bytes, target: "SimShard | SimHead", message: Message, body: bytes, frame: bytes | None = None
    ) -> Callable[[], None]:
        """Puts it on the wire; what is returned is its arrival."""
        ends = frozenset((sender, target.node))
        link = self._links.get(ends)
        if link is None:
            link = self._links[ends] = SimLink(sender, target.node)
        frames = link.frames(sender, message, body, frame)

        def arrive() -> None:
            if not link.is_broken:  # what was under way when it broke is lost
                target.receive(sender, *link.received(target.node, frames), frames)

        return arrive

    def _tell_lost(self, node: bytes, lost: bytes) -> None:
        party = self.shards.get(node) or self.heads.get(node)
        if party is not None:
            party.lost(lost)

    def gone(self, node: bytes) -> None:
        """The system closes a dead process's connections: everybody learns within a millisecond, after what was still under way."""
        for other in [*self.shards, *self.heads]:
            if other != node:
                self._links.pop(frozenset((node, other)), None)
                when = max(self.clock.now_s + self.delay_s, self._arrival_s.get((node, other), 0.0))
                self.clock.at(when, lambda other=other: self._tell_lost(other, node))  # type: ignore[misc]

    def restart(self, node: bytes) -> None:
        """A dead node comes back with the same key and nothing else; heads reach it again."""
        if self.shards[node].is_alive:
            return
        self.shards[node] = SimShard(self, self.shards[node].plan)
        for head in self.heads.values():
            head.returned(node)

    def break_link(self, a: bytes, b: bytes) -> None:
        """Both sides learn of it, each as soon as it can; what was under way is lost."""
        link = self._links.pop(frozenset((a, b)), None)
        if link is not None:
            link.is_broken = True
        self._tell_lost(a, b)
        self._tell_lost(b, a)

    def cut_link(self, a: bytes, b: bytes, seconds: float) -> None:
        """Nothing arrives until it heals; what was sent arrives late."""
        self._cut[frozenset((a, b))] = self.clock.now_s + seconds

    def cut_one_way(self, a: bytes, b: bytes, seconds: float) -> None:
        """What `a` says reaches `b` late; the other direction is well."""
        self._cut_one_way[a, b] = self.clock.now_s + seconds

    def slow_link(self, a: bytes, b: bytes, seconds: float) -> None:
        self._slow[a, b] = seconds

    def was_in_touch(self, a: bytes, b: bytes, since_s: float) -> bool:
        """Whether what was sent after `since_s` met no cut and no slow link."""
        return self._cut.get(frozenset((a, b)), 0.0) <= since_s and self._arrival_s.get((a, b), 0.0) <= since_s + 0.5


def node_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _name(node: bytes) -> str:
    return str(int.from_bytes(node, "big"))
