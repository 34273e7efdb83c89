"""Whom a head still believes: who goes after a complaint, who is left out of the next pipeline, and who never comes back. Pure.

Knows nodes and what was said about them; not messages, stages' contents or the clock.
"""

from collections.abc import Iterable, Sequence

from potluck.orchestrator.recovery import HeadStage

# Codes that say that a node will not do, now or later.
UNFIT = frozenset({"shard_corruption", "weights_mismatch"})


class Blame:
    """`excluded`: failed, and not asked while others are left; of these the distrusted are not asked at all."""

    def __init__(self) -> None:
        self._accusers: set[bytes] = set()  # reported rubbish once, and were believed
        self._reported: dict[bytes, set[bytes]] = {}  # by accuser: of whom the head itself has not found it so
        self._doubted: set[bytes] = set()  # said once that they had not got what another said it had sent
        self._excluded: set[bytes] = set()
        self._distrusted: set[bytes] = set()  # sent rubbish: not taken back, even where nobody else is left

    def __repr__(self) -> str:
        return f"<Blame {len(self._excluded)} excluded, {len(self._distrusted)} distrusted>"

    @property
    def excluded(self) -> frozenset[bytes]:
        return frozenset(self._excluded)

    @property
    def distrusted(self) -> frozenset[bytes]:
        return frozenset(self._distrusted)

    def exclude(self, nodes: Iterable[bytes]) -> None:
        self._excluded.update(nodes)

    def distrust(self, node: bytes) -> None:
        self._distrusted.add(node)

    def returned(self, node: bytes) -> None:
        """It was lost, and has been reached again."""
        if node not in self._distrusted:
            self._excluded.discard(node)

    def forgive(self) -> None:
        """Whoever failed before may be well again (a worker is restarted in its place), and there is nobody else."""
        self._excluded = set(self._distrusted)

    def of_rubbish(self, accuser: HeadStage, culprits: list[HeadStage], stages: Sequence[HeadStage]) -> list[HeadStage]:
        """Who goes after rubbish is reported. Only what the stage before sends can be judged, and nobody is right time after time."""
        node = accuser.placed.node
        before = stages[max(0, stages.index(accuser) - 1)]
        if before not in culprits:
            return [accuser]
        self._distrusted.add(before.placed.node)
        if node in self._accusers:
            return [*culprits, accuser]
        self._accusers.add(node)
        return culprits

    def is_doubtful(self, accuser: HeadStage, accused: Sequence[HeadStage]) -> bool:
        """Whether it has said of others before that they are gone or do not fit, and nobody but itself has found it so."""
        reported = self._reported.setdefault(accuser.placed.node, set())
        has_reported = bool(reported)
        reported.update(stage.placed.node for stage in accused)
        return has_reported

    def confirm(self, node: bytes) -> None:
        """The head's own link to it broke: whoever has said that it is gone was right."""
        for reported in self._reported.values():
            reported.discard(node)

    def of_two(self, giver: HeadStage, taker: HeadStage) -> HeadStage:
        """One says that it has given, the other that it has got nothing: the giver first; where that did not help, the taker."""
        if taker.placed.node in self._doubted:
            return taker
        self._doubted.add(taker.placed.node)
        return giver
