"""Who should be linked to whom, and when to dial again. A pure decision: time and randomness come in.

Up to 32 nodes everybody is linked to everybody; beyond that each node dials the eight that rank first for it, by a hash of both ids:
few links change when somebody comes or goes, and the whole hangs together. Nodes that went away are tried again and again, less often
as time passes; one of them, drawn at random, is tried every second, so that a partition is bridged soon after it ends.
"""

import hashlib
import heapq
import random
from collections.abc import Collection

from potluck.swarm.events import Dial

MESH_UP_TO = 32
SPARSE_LINKS = 8
DIAL_TIMEOUT_S = 2.0  # shorter than elsewhere: what began before a partition ended must not tell long after it
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0
PROBE_EVERY_S = 1.0
_DECIDE_EVERY_S = 0.5
_POLITE_S = 1.0  # the node with the higher id lets the other one dial first
_MAX_UNDER_WAY = 16
_MAX_LOOSE = 64
_MAX_ABSENT = 256


class _Attempt:
    __slots__ = ("failures", "next_s")

    def __init__(self, next_s: float) -> None:
        self.failures, self.next_s = 0, next_s


class Dialler:
    """Told who is there, where, and what came of dialling; answers whom to dial."""

    def __init__(self, node: bytes, draw: random.Random) -> None:
        self._node, self._draw = node, draw
        self._addresses: dict[bytes, tuple[str, ...]] = {}  # of nodes that are there
        self._absent: dict[bytes, tuple[str, ...]] = {}  # of nodes that were, most recent last
        self._loose: dict[str, _Attempt] = {}  # addresses from discovery and invites, of nobody in particular
        self._attempts: dict[bytes, _Attempt] = {}
        self._under_way: dict[bytes | str, float] = {}  # since when
        self._ranks: dict[bytes, int] = {}
        self._first: list[bytes] | None = None
        self._probe_s = self._decide_s = 0.0
        self._probes_left = 0
        self._paused_until_s = 0.0

    def __repr__(self) -> str:
        return f"<Dialler {len(self._addresses)} there, {len(self._absent)} absent, {len(self._under_way)} under way>"

    # ------------------------------------------------------------ who is there

    def is_there(self, node: bytes, addresses: tuple[str, ...], now_s: float) -> None:
        """A node, with the addresses that it gives; new ones are tried at once."""
        is_new = node not in self._addresses
        if self._addresses.get(node) != addresses:
            wait_s = _POLITE_S if is_new and node < self._node else 0.0
            self._attempts[node] = _Attempt(now_s + wait_s)
            self._decide_s = 0.0
        self._addresses[node] = addresses
        self._absent.pop(node, None)
        if is_new:
            self._ranks[node] = rank(self._node, node)
            if self._first is not None and self._is_better(node):
                self._first = None

    def is_gone(self, node: bytes) -> None:
        """Lost, but it may come back: it is tried now and then."""
        addresses = self._addresses.pop(node, None)
        if self._first is not None and node in self._first:
            self._first = None
        if addresses:
            self._absent[node] = addresses
            while len(self._absent) > _MAX_ABSENT:
                self._forget_attempt(next(iter(self._absent)))

    def _forget_attempt(self, node: bytes) -> None:
        self._absent.pop(node, None)
        self._attempts.pop(node, None)
        self._ranks.pop(node, None)

    def forget(self, node: bytes) -> None:
        """It left, or was expelled: it is not tried again."""
        self.is_gone(node)
        self._forget_attempt(node)

    def remember(self, node: bytes, addresses: tuple[str, ...]) -> None:
        """Known from before this start; whether it is there will be seen."""
        if node not in self._addresses and node != self._node and len(self._absent) < _MAX_ABSENT:
            self._absent[node] = addresses
            self._ranks[node] = rank(self._node, node)

    def found(self, address: str, now_s: float) -> None:
        """An address without an id: from an invite, or from discovery."""
        known = self._loose.get(address)
        if known is None:
            self._make_room()
        if len(self._loose) < _MAX_LOOSE and (known is None or known.next_s > now_s + FIRST_RETRY_S):
            self._loose[address] = _Attempt(now_s)  # also where it was seen again just now: there is somebody
        self._decide_s = 0.0

    def _make_room(self) -> None:
        """Anybody on the network can announce addresses; those that led nowhere give way."""
        if len(self._loose) >= _MAX_LOOSE:
            worst = max(self._loose, key=lambda address: self._loose[address].failures)
            if self._loose[worst].failures:
                del self._loose[worst]

    def somebody_returned(self) -> None:
        """Perhaps a partition ended: where everybody is linked to everybody, all that are away are tried at once."""
        if len(self._addresses) + len(self._absent) <= 2 * MESH_UP_TO:
            self._probes_left = len(self._absent)
            self._decide_s = 0.0

    # ------------------------------------------------------------ decisions

    def pause(self, until_s: float) -> None:
        """Nobody is dialled before then: they all said that this node is not welcome."""
        self._paused_until_s = until_s

    def decide(self, linked: Collection[bytes], now_s: float) -> list[Dial]:
        """Whom to dial now; each is under way until `succeeded` or `failed`."""
        if now_s < self._decide_s or now_s < self._paused_until_s:
            return []
        self._decide_s = now_s + _DECIDE_EVERY_S
        lacking = [node for node in self._wanted() if node not in linked]
        dials = [dial for node in lacking if (dial := self._dial(node, now_s)) is not None]
        if self._loose:
            dials += self._loose_dials(now_s)
        if now_s >= self._probe_s:
            self._probe_s = now_s + PROBE_EVERY_S * self._draw.uniform(0.8, 1.2)
            self._probes_left = max(self._probes_left, 1)
        if self._probes_left:
            dials += self._probes(linked)
        if dials:
            dials = dials[: max(0, _MAX_UNDER_WAY - len(self._under_way))]
            self._under_way.update((_name(dial), now_s) for dial in dials)
        return dials

    def begin(self, dial: Dial, now_s: float) -> bool:
        """Somebody else wants this dial; False where it is under way already."""
        if _name(dial) in self._under_way or now_s < self._paused_until_s:
            return False
        self._under_way[_name(dial)] = now_s
        return True

    def succeeded(self, dial: Dial, node: bytes) -> None:
        self._under_way.pop(_name(dial), None)
        self._attempts.pop(node, None)
        if dial.node is None:
            self._loose.pop(dial.addresses[0], None)  # whoever it is says in its advert where it can be reached

    def failed(self, dial: Dial, now_s: float) -> float:
        """Returns when it was dialled."""
        since_s = self._under_way.pop(_name(dial), now_s)
        attempt = self._loose.get(dial.addresses[0])
        if dial.node is not None:
            attempt = self._attempts.setdefault(dial.node, _Attempt(now_s))
        if attempt is not None:
            wait_s = min(FIRST_RETRY_S * 2.0**attempt.failures, LAST_RETRY_S)
            attempt.failures = min(attempt.failures + 1, 16)
            attempt.next_s = now_s + wait_s * self._draw.uniform(0.75, 1.25)
        return since_s

    def _wanted(self) -> Collection[bytes]:
        if len(self._addresses) < MESH_UP_TO:
            return self._addresses
        if self._first is None:
            self._first = heapq.nsmallest(SPARSE_LINKS, self._addresses, key=self._ranks.__getitem__)
        return self._first

    def _is_better(self, node: bytes) -> bool:
        first = self._first
        return first is not None and (len(first) < SPARSE_LINKS or self._ranks[node] < self._ranks[first[-1]])

    def _dial(self, node: bytes, now_s: float) -> Dial | None:
        if node in self._under_way or node == self._node:
            return None
        attempt, addresses = self._attempts.get(node), self._addresses[node]
        return None if not addresses or (attempt is not None and attempt.next_s > now_s) else Dial(node, addresses)

    def _loose_dials(self, now_s: float) -> list[Dial]:
        return [
            Dial(None, (address,))
            for address, attempt in self._loose.items()
            if attempt.next_s <= now_s and address not in self._under_way
        ]

    def _probes(self, linked: Collection[bytes]) -> list[Dial]:
        absent = [node for node in self._absent if node not in linked and node not in self._under_way]
        chosen = self._draw.sample(absent, min(len(absent), self._probes_left, _MAX_UNDER_WAY))
        self._probes_left = self._probes_left - len(chosen) if len(absent) > len(chosen) else 0
        return [Dial(node, self._absent[node]) for node in chosen]


def _name(dial: Dial) -> bytes | str:
    return dial.node if dial.node is not None else dial.addresses[0]


def rank(own: bytes, other: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(own + other, digest_size=8).digest(), "big")
