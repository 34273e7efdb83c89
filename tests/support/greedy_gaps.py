"""Filling the gaps of a pipeline greedily: the baseline that routing is compared with."""

from collections.abc import Sequence

from potluck.planner.cover import Candidate, Placed, greedy_cover
from potluck.wire.messages import Stage


def replace_gaps(
    kept: Sequence[Placed | None], candidates: Sequence[Candidate], excluded: frozenset[bytes], layer_count: int
) -> list[list[Placed]] | None:
    """For each place of a pipeline what stands there now: itself where it is kept, a cover of its range where it is lost.

    Neighbouring losses are covered together, under the first of them. None where some layer has no holder.
    """
    usable = [candidate for candidate in candidates if candidate.node not in excluded]
    groups: list[list[Placed]] = []
    index = 0
    while index < len(kept):
        placed = kept[index]
        if placed is not None:
            groups.append([placed])
            index += 1
            continue
        first = index
        while index < len(kept) and kept[index] is None:
            index += 1
        before = kept[first - 1] if first > 0 else None
        after = kept[index] if index < len(kept) else None
        wanted = Stage(
            before.stage.stop if before is not None else 0,
            after.stage.start if after is not None else layer_count,
            before is None,
            after is None,
        )
        cover = greedy_cover(usable, wanted)
        if cover is None:
            return None
        groups.append(cover)
        groups += [[] for _ in range(index - first - 1)]
    return groups
