"""How a broken pipeline is put together again: which stages stay, which are new, and where each new one gets its past from. Pure.

A new stage must be fed every position below `resume`: by the stage before it from its outbox, or, where that keeps none, by
recomputing that stage too; before the first stage stands the head, which has the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from potluck.planner.cover import Placed


@dataclass
class HeadStage:
    """One stage as the head sees it. `is_new`: not opened yet, though perhaps asked; `is_empty`: it holds no position yet
    (or must forget them all)."""

    placed: Placed
    session: bytes
    is_new: bool = True
    is_asked: bool = False
    is_empty: bool = True
    has_outbox: bool = True
    is_lost: bool = False  # and waits for a replacement, which may be the same node, come back with nothing
    resumes: bytes | None = None  # a session of an earlier request there, which this one begins with

    @cached_property
    def name(self) -> str:
        stage = self.placed.stage
        return f"{self.placed.node.hex()[:8]}:{stage.start}-{stage.stop - 1}"


@dataclass(frozen=True)
class Feed:
    """Who replays to whom: stage `source` (None: the head, from the journal) to stages `first` … `last`, which are empty."""

    source: int | None
    first: int
    last: int


@dataclass
class Rebuild:
    """What an epoch needs: the runs of empty stages with their sources, and how far each stage sends on."""

    feeds: list[Feed] = field(default_factory=list)
    forward_from: list[int] = field(default_factory=list)


def spread_emptiness(stages: Sequence[HeadStage]) -> list[int]:
    """Stages that must forget everything too, because the empty stage after them cannot be fed otherwise."""
    reset = []
    for index in range(len(stages) - 1, 0, -1):
        if stages[index].is_empty and not stages[index - 1].is_empty and not stages[index - 1].has_outbox:
            stages[index - 1].is_empty = True
            reset.append(index - 1)
    return reset


def plan_rebuild(stages: Sequence[HeadStage], resume: int) -> Rebuild:
    """For stages after `spread_emptiness`. Each sends on what its successor has not: everything, where that is empty.

    So a source knows what it owes even before it is told to replay, and can send that first should a step overtake the order.
    """
    followers = [*stages[1:], None]
    plan = Rebuild(forward_from=[0 if after is not None and after.is_empty else resume for after in followers])
    index = 0
    while index < len(stages):
        first = index
        while index < len(stages) and stages[index].is_empty:
            index += 1
        if index > first and resume > 0:
            plan.feeds.append(Feed(first - 1 if first > 0 else None, first, index - 1))
        index += 1
    return plan
