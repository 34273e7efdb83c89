"""A swarm's membership on simulated time: the real gossip, dialling and records of each node, on a network that is only a queue.

Nodes join, are killed, unplugged (nobody is told), leave, come back, are expelled; the network is cut in two and healed. Every message is
weighed as it would be on the wire. Trust is the simplest that gossip can be given: a founder signs who belongs.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from potluck.core.errors import RecordRefused
from potluck.identity.keys import NodeKey
from potluck.identity.signed import Signed, sign
from potluck.swarm.acceptance import EXPULSION, Trust
from potluck.swarm.adverts import ADVERT_LIFETIME_S, Advert, AdvertReader, sign_advert
from potluck.swarm.dialling import DIAL_TIMEOUT_S
from potluck.swarm.events import Dial, Drop, Event, Outcome
from potluck.swarm.membership import Membership
from potluck.wire.effects import SendTo
from potluck.wire.frames import HEADER_BYTES
from potluck.wire.messages import Message, ShardInfo, Stage, SwarmMessage

LATENCY_S = 0.002
TICK_S = 0.25
MEMBER = "member"
_LAYERS = 32
_encode = msgspec.msgpack.Encoder().encode


class Roster:
    """One node's knowledge of who belongs: what the founder signed."""

    def __init__(self, founder: bytes) -> None:
        self._founder = founder
        self.members, self.expelled = {founder}, set[bytes]()

    def accept(self, record: Signed) -> None:
        if record.signer != self._founder:
            raise RecordRefused("unauthorised", "signed by somebody who may not say so")
        if record.kind == EXPULSION:
            self.expelled.add(record.payload)
            self.members.discard(record.payload)
        elif record.payload not in self.expelled:
            self.members.add(record.payload)

    def trust(self) -> Trust:
        return Trust(self.accept, self.members.__contains__, self.expelled.__contains__)


class SimulatedNode:
    """A machine: its key and what lies on its disk stay when it is off."""

    def __init__(self, number: int, founder: bytes | None) -> None:
        self.number = number
        self.key = NodeKey.from_seed(number.to_bytes(32, "big"))
        self.id = self.key.node_id
        self.address = f"sim:{number}"
        self.roster = Roster(founder or self.id)
        self.membership: Membership | None = None  # while it runs
        self.incarnation = 0
        self.run = 0
        self.links: dict[bytes, None] = {}  # in order, so that a seed always gives the same run
        self.is_plugged = True
        self.side = 0
        self.gone_s = 0.0
        self.sent_bytes = 0
        self.sent_messages = 0
        self.events: list[tuple[float, Event]] = []

    def __repr__(self) -> str:
        return f"<SimulatedNode {self.number} {'up' if self.is_up else 'down'}, {len(self.links)} links>"

    @property
    def is_up(self) -> bool:
        return self.membership is not None

    def facts(self) -> Advert:
        """An advert of a usual size: one shard, one held model, a few figures."""
        start = self.number % _LAYERS
        shard = ShardInfo("a-model-of-usual-name", "5" * 64, 1, _LAYERS, Stage(start, start + 1), True, 16, 0, 0, 1500)
        return Advert(
            node=self.id, name=f"machine-{self.number}", software="0.1.0", arithmetic=1, addresses=(self.address,),
            shards=(shard,), memory_total_bytes=16 << 30, memory_available_bytes=9 << 30, memory_budget_bytes=8 << 30, threads=8,
            allows_serving=True,
        )  # fmt: skip


class SimulatedSwarm:
    """The machines, the network between them, and the clock. `founder` is the first machine."""

    def __init__(self, count: int, seed: int = 0, keeps_events: bool = True) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.reader = AdvertReader()
        self.keeps_events = keeps_events
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._wire: deque[tuple[float, int, SimulatedNode, int, SimulatedNode, Any]] = (
            deque()
        )  # messages, first come first
        self._order = itertools.count()
        self.nodes: dict[bytes, SimulatedNode] = {}
        self._by_address: dict[str, SimulatedNode] = {}
        self.records: list[Signed] = []
        self._weighed: Message | None = None
        self._weight = 0
        self.founder = self._add_machine()
        for _ in range(count - 1):
            self.admit(self._add_machine())
        self.is_cut = False

    def __repr__(self) -> str:
        return f"<SimulatedSwarm {len(self.up())} of {len(self.nodes)} up at {self.now_s:.1f} s>"

    def up(self) -> list[SimulatedNode]:
        return [node for node in self.nodes.values() if node.is_up]

    def _add_machine(self) -> SimulatedNode:
        number = len(self.nodes)
        node = SimulatedNode(number, self.founder.id if number else None)
        self.nodes[node.id] = self._by_address[node.address] = node
        return node

    def new_machine(self) -> SimulatedNode:
        """A machine that has an invite: the founder admits it now; `start` it next."""
        node = self._add_machine()
        self.admit(node)
        return node

    # ------------------------------------------------------------ what people do

    def admit(self, node: SimulatedNode) -> None:
        self._say(sign(self.founder.key, MEMBER, node.id))

    def expel(self, node: SimulatedNode) -> None:
        self._say(sign(self.founder.key, EXPULSION, node.id))

    def _say(self, record: Signed) -> None:
        self.records.append(record)
        if self.founder.membership is not None:
            self._apply(self.founder, self.founder.membership.add_records([record], self.now_s))

    def start(self, node: SimulatedNode, knows: int = 3) -> None:
        """Switched on, with the records and a few addresses that lie on its disk (or came with its invite)."""
        node.incarnation += 1
        node.run += 1
        node.is_plugged, node.links = True, {}
        node.membership = Membership(
            node.id, lambda advert: sign_advert(node.key, advert), node.roster.trust(), random.Random(self.random.random()),
            self.now_s, node.incarnation, self.reader,
        )  # fmt: skip
        self._apply(node, node.membership.add_records(self.records, self.now_s))
        others = [other for other in self.up() if other is not node]
        known = self.random.sample(others, min(knows, len(others)))
        for other in known if self.founder in known or not self.founder.is_up else [self.founder, *known]:
            if other is not node:
                node.membership.remember(other.id, (other.address,))
        self._apply(node, node.membership.publish(node.facts(), self.now_s))
        self._later(self.random.random() * TICK_S, self._tick, node, node.run)

    def start_all(self) -> None:
        for node in self.nodes.values():
            self.start(node)

    def kill(self, node: SimulatedNode) -> None:
        """The process dies; the system resets its connections."""
        self._switch_off(node)
        for peer in node.links:
            self._later(LATENCY_S, self._cut_off, self.nodes[peer], node.id)

    def unplug(self, node: SimulatedNode) -> None:
        """No word to anybody: a cable, or power."""
        self._switch_off(node)
        node.is_plugged = False

    def leave(self, node: SimulatedNode) -> None:
        if node.membership is not None:
            self._apply(node, node.membership.publish(None, self.now_s))
        self._later(0.2, self.kill, node)

    def _switch_off(self, node: SimulatedNode) -> None:
        node.membership, node.gone_s = None, self.now_s
        node.run += 1

    def partition(self, others: set[bytes]) -> None:
        for node in self.nodes.values():
            node.side = int(node.id in others)

    def heal(self) -> None:
        self.partition(set())

    # ------------------------------------------------------------ time

    def _later(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), act, arguments))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        queue, wire = self._queue, self._wire
        while queue or wire:
            if wire and (not queue or wire[0] < queue[0]):  # two never are of the same time and order
                if wire[0][0] > end_s:
                    break
                self.now_s, _, *arguments = wire.popleft()
                self._deliver(*arguments)
            elif queue[0][0] > end_s:
                break
            else:
                self.now_s, _, act, given = heapq.heappop(queue)
                act(*given)
        self.now_s = end_s

    def run_until(self, is_done: Callable[[], bool], limit_s: float, step_s: float = 0.05) -> float:
        """How long it took; `limit_s` where it did not happen."""
        start_s = self.now_s
        while not is_done():
            if self.now_s - start_s >= limit_s:
                return limit_s
            self.run(step_s)
        return self.now_s - start_s

    def _tick(self, node: SimulatedNode, run: int) -> None:
        if node.run == run and node.membership is not None:
            self._apply(node, node.membership.tick(self.now_s))
            self._later(TICK_S, self._tick, node, run)

    # ------------------------------------------------------------ the network

    def _can_reach(self, a: SimulatedNode, b: SimulatedNode) -> bool:
        return a.is_plugged and b.is_plugged and a.side == b.side

    def _apply(self, node: SimulatedNode, outcome: Outcome) -> None:
        if self.keeps_events and outcome.events:
            node.events += [(self.now_s, event) for event in outcome.events]
        for effect in outcome.effects:
            if isinstance(effect, SendTo):
                self._send(node, effect.node, effect.message)
            elif isinstance(effect, Dial):
                self._dial(node, effect)
            elif isinstance(effect, Drop):
                self._drop(node, effect.node)

    def _send(self, node: SimulatedNode, peer: bytes, message: Message) -> None:
        if peer in node.links:
            if message is not self._weighed:  # the same one often goes to several
                self._weighed, self._weight = message, len(_encode(message)) + HEADER_BYTES
            node.sent_bytes += self._weight
            node.sent_messages += 1
            self._wire.append((self.now_s + LATENCY_S, next(self._order), node, node.run, self.nodes[peer], message))

    def _deliver(self, sender: SimulatedNode, run: int, node: SimulatedNode, message: SwarmMessage) -> None:
        if sender.run != run or not (sender.is_plugged and node.is_plugged and sender.side == node.side):
            return
        if node.membership is None or sender.id not in node.links:
            self._later(LATENCY_S, self._cut_off, sender, node.id)
        else:
            self._apply(node, node.membership.on_message(sender.id, message, self.now_s))

    def _cut_off(self, node: SimulatedNode, peer: bytes) -> None:
        """The link is found to be gone."""
        if peer in node.links and self._can_reach(node, self.nodes[peer]):
            node.links.pop(peer, None)
            if node.membership is not None:
                self._apply(node, node.membership.link_lost(peer, "connection lost", self.now_s))

    def _drop(self, node: SimulatedNode, peer: bytes) -> None:
        if peer in node.links:
            node.links.pop(peer, None)
            self._later(LATENCY_S, self._cut_off, self.nodes[peer], node.id)
            if node.membership is not None:
                self._apply(node, node.membership.link_lost(peer, "dropped", self.now_s))

    def _dial(self, node: SimulatedNode, dial: Dial) -> None:
        target = self._by_address[dial.addresses[0]]
        if not self._can_reach(node, target):
            self._later(DIAL_TIMEOUT_S, self._dial_failed, node, node.run, dial, "did not answer")
        else:
            self._later(3 * LATENCY_S, self._connect, node, node.run, target, dial)

    def _connect(self, node: SimulatedNode, run: int, target: SimulatedNode, dial: Dial) -> None:
        is_welcome = target.is_up and node.id in target.roster.members
        if not is_welcome or not self._can_reach(node, target):
            return self._dial_failed(node, run, dial, "turned away" if target.is_up else "nobody is there")
        if node.run == run and node.membership is not None:
            if node.id in target.links and target.membership is not None:  # an older link of a former life
                target.links.pop(node.id, None)
                if target.id not in node.links:
                    self._apply(target, target.membership.link_lost(node.id, "connection lost", self.now_s))
            node.links[target.id] = target.links[node.id] = None
            self._apply(node, node.membership.dialled(dial, target.id, self.now_s))
        return None

    def _dial_failed(self, node: SimulatedNode, run: int, dial: Dial, reason: str) -> None:
        if node.run == run and node.membership is not None:
            self._apply(node, node.membership.dial_failed(dial, reason, self.now_s))

    # ------------------------------------------------------------ questions

    def knows(self, node: SimulatedNode, other: SimulatedNode) -> bool:
        return node.membership is not None and node.membership.gossip.is_present(other.id)

    def all_know(self, other: SimulatedNode) -> bool:
        return all(self.knows(node, other) for node in self.up())

    def none_knows(self, other: SimulatedNode) -> bool:
        return not any(self.knows(node, other) for node in self.up() if node is not other)

    def is_converged(self) -> bool:
        """Everybody sees exactly those who are there."""
        expected = {node.id for node in self.up() if node.id not in self.founder.roster.expelled}
        return all(self.seen_by(node) == expected for node in self.up() if node.id in expected)

    def seen_by(self, node: SimulatedNode) -> set[bytes]:
        return {advert.node for advert in node.membership.gossip.adverts()} if node.membership is not None else set()

    def ghosts(self, node: SimulatedNode, slack_s: float = 5.0) -> list[SimulatedNode]:
        """Machines that went so long ago that every advert of theirs must be forgotten."""
        oldest_s = self.now_s - ADVERT_LIFETIME_S - slack_s
        others = (self.nodes[other] for other in self.seen_by(node))
        return [other for other in others if not other.is_up and other.gone_s < oldest_s]

    def traffic(self, seconds: float) -> tuple[float, float]:
        """Bytes and messages per node and second, over so much time from now on."""
        before = [(node.sent_bytes, node.sent_messages) for node in self.nodes.values()]
        count = len(self.up())
        self.run(seconds)
        after = [(node.sent_bytes, node.sent_messages) for node in self.nodes.values()]
        sums = [sum(b[part] - a[part] for a, b in zip(before, after, strict=True)) for part in (0, 1)]
        return sums[0] / count / seconds, sums[1] / count / seconds


class ChurnReport(msgspec.Struct, frozen=True):
    """`ghosts`: sightings of machines after every advert of theirs must have ended; there may be none."""

    minutes: float
    went: int
    came: int
    ghosts: int
    is_converged: bool  # some time after the last change


def churn(swarm: SimulatedSwarm, minutes: float, share_per_minute: float = 0.1) -> ChurnReport:
    """So many of the machines go each minute, killed, unplugged or in good order, and as many others come (back)."""
    gap_s = 60.0 / max(1.0, len(swarm.up()) * share_per_minute)
    end_s, went, came, ghosts = swarm.now_s + minutes * 60.0, 0, 0, 0
    expelled = swarm.founder.roster.expelled
    away = [node for node in swarm.nodes.values() if not node.is_up and node.id not in expelled]
    while swarm.now_s < end_s:
        swarm.run(gap_s)
        victim = swarm.random.choice([node for node in swarm.up() if node is not swarm.founder])
        swarm.random.choice((swarm.kill, swarm.unplug, swarm.leave))(victim)
        away.append(victim)
        went += 1
        if len(away) > max(2, len(swarm.nodes) // 5):
            swarm.start(away.pop(0))
            came += 1
        witness = swarm.random.choice(swarm.up())
        ghosts += len(swarm.ghosts(witness))
    swarm.run(ADVERT_LIFETIME_S + 5.0)
    ghosts += sum(len(swarm.ghosts(node)) for node in swarm.up())
    return ChurnReport(minutes, went, came, ghosts, swarm.is_converged())
