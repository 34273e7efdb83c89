"""Which links carry all news in a swarm too large for a link to everybody: few, known to both ends, and enough to reach everyone.

Each node chooses four of its links and says so to the other end; news travels over these, in both directions. Links that were made to
look for somebody, or that outlived a better choice, stay for other uses and carry no news. No I/O.
"""

from potluck.swarm.dialling import rank
from potluck.swarm.findings import Findings
from potluck.wire.messages import TellMe

CHOSEN = (
    4  # each has four, and is chosen by four: with so many, random choices hang together also while some of them die
)


class Backbone:
    """The choice falls by a hash of both ids: so it crosses what was a partition as soon as links do."""

    def __init__(self, node: bytes, findings: Findings) -> None:
        self._node, self._findings = node, findings
        self._ranks: dict[bytes, int] = {}  # of linked nodes
        self._chosen: dict[bytes, None] = {}
        self._told: dict[bytes, None] = {}  # those that know that they are chosen
        self._chosen_by: dict[bytes, None] = {}
        self._carriers: list[bytes] | None = None
        self._is_told = True

    def __repr__(self) -> str:
        return f"<Backbone {len(self._chosen)} chosen, by {len(self._chosen_by)}>"

    @property
    def carriers(self) -> list[bytes]:
        """The linked nodes that are told everything."""
        if self._carriers is None:
            self._carriers = list(self._chosen | self._chosen_by)
        return self._carriers

    def link_up(self, node: bytes) -> None:
        self._ranks[node] = rank(self._node, node)
        self._choose()

    def link_lost(self, node: bytes) -> None:
        for table in (self._ranks, self._told, self._chosen_by):
            table.pop(node, None)
        self._choose()

    def _choose(self) -> None:
        self._chosen = dict.fromkeys(sorted(self._ranks, key=self._ranks.__getitem__)[:CHOSEN])
        self._carriers, self._is_told = None, False

    def is_chosen_by(self, node: bytes, is_chosen: bool) -> None:
        """The other end of a link said so."""
        if is_chosen and node in self._ranks:
            self._chosen_by[node] = None
        else:
            self._chosen_by.pop(node, None)
        self._carriers = None

    def tell_choice(self) -> None:
        """Tell those concerned, where the choice changed."""
        if self._is_told:
            return
        self._is_told = True
        for node in self._chosen:
            if node not in self._told:
                self._findings.send(node, TellMe(True))
        for node in self._told:
            if node not in self._chosen:
                self._findings.send(node, TellMe(False))
        self._told = dict(self._chosen)
