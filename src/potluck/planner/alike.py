"""Pipelines of shards that compute alike: chosen where there is one, mixed ones where they are much quicker or the only way. Pure.

Shards of one arithmetic give an answer that the loss of any of them does not change by more than their level of exactness allows.
"""

from collections.abc import Sequence

from potluck.planner.cover import Candidate, Placed
from potluck.planner.route import RouteRules, quickest_around, quickest_replacements, route_seconds

MIXED_GAIN = 0.25  # a mixed pipeline is taken where one of a kind would take so much longer


def pick_pipeline(
    candidates: Sequence[Candidate], own: Sequence[Placed], layer_count: int, rules: RouteRules
) -> list[Placed] | None:
    """`quickest_around`, with a preference for shards of one kind."""
    quickest = quickest_around(candidates, own, layer_count, rules)
    if quickest is None or len(kinds_of(quickest)) <= 1:
        return quickest
    longest_s = route_seconds(candidates, quickest, rules) * (1 + MIXED_GAIN)
    alike = [
        (route_seconds(candidates, found, rules), found)
        for kind in sorted({candidate.arithmetic for candidate in candidates})
        if (found := quickest_around(_of_kinds(candidates, {kind}), own, layer_count, rules)) is not None
    ]
    seconds, found = min(alike, key=lambda each: each[0], default=(longest_s, None))
    return found if found is not None and seconds <= longest_s else quickest


class Replacer:
    """Finds stand-ins for one generation: of the kinds that it began with; of any, from when on those do not suffice."""

    def __init__(self, pipeline: Sequence[Placed]) -> None:
        self.kinds = kinds_of(pipeline)

    def replacements(
        self, kept: Sequence[Placed | None], candidates: Sequence[Candidate], excluded: frozenset[bytes],
        layer_count: int, rules: RouteRules,
    ) -> list[list[Placed]] | None:  # fmt: skip
        own_kind = _of_kinds(candidates, self.kinds)
        groups = quickest_replacements(kept, own_kind, excluded, layer_count, rules)
        if groups is None and len(own_kind) < len(candidates):
            groups = quickest_replacements(kept, candidates, excluded, layer_count, rules)
            self.kinds |= kinds_of([placed for group in groups or () for placed in group])
        return groups


def kinds_of(stages: Sequence[Placed]) -> set[int]:
    return {placed.arithmetic for placed in stages}


def _of_kinds(candidates: Sequence[Candidate], kinds: set[int]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.arithmetic in kinds]
