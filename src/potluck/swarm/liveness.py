"""Who answers: pings in turn, round trips, and a node's own opinion of each other node. No I/O; time is told.

Only what this node found out itself makes a node lost: a broken link that cannot be dialled again, or pings without an answer.
"""

import enum
import random
from collections.abc import Collection, Iterable

PING_EVERY_S = 1.0
PING_TIMEOUT_S = 1.0
PING_RETRY_S = 0.75
PING_ATTEMPTS = 3
_SMOOTHING = 0.2
MAX_REPORTS = 1024
REPORT_MEMORY_S = 30.0
MAX_TURNS = 3


class Standing(enum.Enum):
    """ALIVE → SUSPECT (no answer, or reported) → ALIVE or LOST; LOST → ALIVE when it answers again."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


def own_report(node: bytes) -> bytes:
    """The name under which it is remembered that this node itself reported another."""
    return b"own" + node


class _Waiting:
    __slots__ = ("attempts", "deadline_s", "nonce", "sent_s")

    def __init__(self, nonce: int, sent_s: float, deadline_s: float, attempts: int) -> None:
        self.nonce, self.sent_s, self.deadline_s, self.attempts = nonce, sent_s, deadline_s, attempts


class _Report:
    __slots__ = ("at_s", "informed", "latest", "stamp", "turns")

    def __init__(self, stamp: tuple[int, int], at_s: float, before: "_Report | None" = None) -> None:
        """`turns`: how often a report of the latest statement, or of an older one, was told again."""
        self.stamp, self.at_s = stamp, at_s
        self.latest: tuple[int, int] = stamp
        self.turns: int = 0
        if before is not None and stamp <= before.latest:
            self.latest, self.turns = before.latest, before.turns + 1
        self.informed: set[bytes] = set()


class Liveness:
    """Pings under way, round trips, and standings; a node that is not mentioned is alive."""

    def __init__(self, draw: random.Random, now_s: float) -> None:
        self._draw = draw
        self._order: list[bytes] = []
        self._waiting: dict[bytes, _Waiting] = {}
        self._standings: dict[bytes, Standing] = {}
        self._lost_s: dict[bytes, float] = {}
        self._rtts_s: dict[bytes, float] = {}
        self._checks: dict[bytes, _Report] = {}  # when to look for ourselves after what somebody else said
        self._reported: dict[bytes, _Report] = {}
        self._next_ping_s = now_s + draw.random() * PING_EVERY_S

    def __repr__(self) -> str:
        return f"<Liveness {len(self._waiting)} pings under way, {len(self._standings)} doubted>"

    def standing(self, node: bytes) -> Standing:
        return self._standings.get(node, Standing.ALIVE)

    def is_doubted(self, node: bytes) -> bool:
        return node in self._standings

    def lost_s(self, node: bytes) -> float:
        """When it was lost."""
        return self._lost_s.get(node, 0.0)

    @property
    def lost_count(self) -> int:
        return len(self._lost_s)

    def lose(self, node: bytes, now_s: float) -> None:
        self.set_standing(node, Standing.LOST)
        self._lost_s[node] = now_s

    def set_standing(self, node: bytes, standing: Standing) -> bool:
        """Whether that is news."""
        if self._standings.get(node, Standing.ALIVE) is standing:
            return False
        if standing is Standing.ALIVE:
            del self._standings[node]
            self._lost_s.pop(node, None)
        else:
            self._standings[node] = standing
        return True

    def rtt_us(self, node: bytes) -> int:
        return int(self._rtts_s.get(node, 0.0) * 1e6)

    def rtts_us(self) -> dict[bytes, int]:
        return {node: int(rtt_s * 1e6) for node, rtt_s in self._rtts_s.items()}

    # ------------------------------------------------------------ pings

    def due(self, linked: Collection[bytes], now_s: float) -> bytes | None:
        """Whom to ping now: each linked node in turn, in an order that is drawn anew each round."""
        if now_s < self._next_ping_s:
            return None
        self._next_ping_s = now_s + PING_EVERY_S * self._draw.uniform(0.9, 1.1)
        while linked:
            if not self._order:
                self._order = sorted(linked)
                self._draw.shuffle(self._order)
            node = self._order.pop()
            if node in linked and node not in self._waiting:
                return node
            if len(self._waiting) >= len(linked):
                return None
        return None

    def is_waiting(self, node: bytes) -> bool:
        return node in self._waiting

    def ping(self, node: bytes, now_s: float, attempts: int = PING_ATTEMPTS) -> int:
        """A nonce for a ping that is sent now."""
        nonce = self._draw.getrandbits(62)
        timeout_s = PING_TIMEOUT_S if attempts == PING_ATTEMPTS else PING_RETRY_S
        patience_s = max(timeout_s, 4 * self._rtts_s.get(node, 0.0))
        self._waiting[node] = _Waiting(nonce, now_s, now_s + patience_s, attempts)
        return nonce

    def pong(self, node: bytes, nonce: int, now_s: float) -> bool:
        waiting = self._waiting.get(node)
        if waiting is None or waiting.nonce != nonce:
            return False
        del self._waiting[node]
        rtt_s = now_s - waiting.sent_s
        known_s = self._rtts_s.get(node)
        self._rtts_s[node] = rtt_s if known_s is None else known_s + _SMOOTHING * (rtt_s - known_s)
        return True

    def unanswered(self, now_s: float) -> list[tuple[bytes, int]]:
        """Pings whose time is over, with the attempts that are left."""
        if not self._waiting:
            return []
        late = [(node, waiting) for node, waiting in self._waiting.items() if waiting.deadline_s <= now_s]
        for node, _ in late:
            del self._waiting[node]
        return [(node, waiting.attempts - 1) for node, waiting in late]

    def slept(self) -> None:
        """This machine was not running: what went unanswered says nothing about others."""
        self._waiting.clear()
        self._checks.clear()

    # ------------------------------------------------------------ what others say

    def is_new_report(self, node: bytes, stamp: tuple[int, int], now_s: float) -> bool:
        """Whether this was not heard lately; remembered from now on, until the node is heard again."""
        if self._knows(node, stamp, now_s):
            return False
        before = self._reported.pop(node, None)
        while len(self._reported) >= MAX_REPORTS:
            del self._reported[next(iter(self._reported))]
        self._reported[node] = _Report(stamp, now_s, before)
        return True

    def _knows(self, node: bytes, stamp: tuple[int, int], now_s: float) -> bool:
        """A report of an older statement than the last one is told again, which helps after a partition; but not for ever.

        Without an end to it, two reports chase each other round a large swarm.
        """
        known = self._reported.get(node)
        if known is None or known.at_s <= now_s - REPORT_MEMORY_S:
            return False
        return stamp == known.stamp or (stamp <= known.latest and known.turns >= MAX_TURNS)

    def is_known_report(self, node: bytes, stamp: tuple[int, int], sender: bytes, now_s: float) -> bool:
        """Whether this was heard lately; then `sender` is one more who knows."""
        if not self._knows(node, stamp, now_s):
            return False
        self._reported[node].informed.add(sender)
        return True

    def informed(self, node: bytes) -> set[bytes]:
        """Who told this node of the report, or was told by it; to be added to."""
        report = self._reported.get(node)
        return report.informed if report is not None else set()

    def is_back(self, node: bytes) -> None:
        """Whatever was reported of it before counts no more."""
        self._reported.pop(node, None)
        self._reported.pop(own_report(node), None)

    def was_reported(self, node: bytes, stamp: tuple[int, int], now_s: float) -> bool:
        """Whether somebody missed it lately, after a statement as new as this one."""
        report = self._reported.get(node)
        return report is not None and report.stamp >= stamp and report.at_s > now_s - REPORT_MEMORY_S

    def check_later(self, node: bytes, stamp: tuple[int, int], at_s: float) -> None:
        """Unless it makes a newer statement than this one before then."""
        check = self._checks.setdefault(node, _Report(stamp, at_s))
        check.stamp = max(check.stamp, stamp)

    def refuted(self, node: bytes, stamp: tuple[int, int]) -> bool:
        """It made this statement: a report of before need not be looked into any more. Whether there was one."""
        check = self._checks.get(node)
        if check is None or check.stamp >= stamp:
            return False
        del self._checks[node]
        return True

    def checks_due(self, now_s: float) -> list[bytes]:
        due = [node for node, check in self._checks.items() if check.at_s <= now_s] if self._checks else []
        for node in due:
            del self._checks[node]
        return due

    def forget(self, nodes: Iterable[bytes]) -> None:
        for node in nodes:
            for table in (self._waiting, self._standings, self._lost_s, self._rtts_s, self._checks):
                table.pop(node, None)
