"""Routing a request over shards that are loaded, with stand-ins named in advance. Pure; in place of the functions of `cover.py`.

A request may use part of a shard, and a node may serve two stages. What a way costs, and the shortest, is `shortest_path.py`'s.
"""

import itertools
from collections.abc import Sequence

import msgspec

from potluck.planner.cover import Candidate, Placed
from potluck.planner.shortest_path import Prepared, RouteRules, entry_s, holds, leave_s, shortest_path, work_s
from potluck.wire.messages import Stage

__all__ = [
    "Route",
    "RouteRules",
    "are_held",
    "between_own",
    "quickest_around",
    "quickest_cover",
    "quickest_replacements",
    "route",
    "route_seconds",
    "standby",
]


class Route(msgspec.Struct, frozen=True):
    """The stages, and for each what would stand in for it: other holders of the same layers; empty where there are none."""

    stages: tuple[Placed, ...]
    standbys: tuple[tuple[Placed, ...], ...]
    seconds: float  # expected for one token, from the head to the head


_ANYTHING = RouteRules()


# ---------------------------------------------------------------- in place of greedy_cover, cover_around and replace_gaps


def quickest_cover(
    candidates: Sequence[Candidate],
    wanted: Stage,
    rules: RouteRules = _ANYTHING,
    before: bytes | None = None,
    after: bytes | None = None,
) -> list[Placed] | None:
    """In place of `greedy_cover`. `before` and `after` are the nodes between which it must fit (None: the head)."""
    return shortest_path(Prepared(candidates, rules), wanted, before, after, rules.max_shards)


def quickest_around(
    candidates: Sequence[Candidate], own: Sequence[Placed], layer_count: int, rules: RouteRules = _ANYTHING
) -> list[Placed] | None:
    """In place of `cover_around`: one's own ends of the model with others' layers between them."""
    prefix = next((placed for placed in own if placed.stage.has_embedding), None)
    suffix = next((placed for placed in own if placed.stage.has_output and placed is not prefix), None)
    if prefix is not None and prefix.stage.has_output:
        return [prefix]
    return _between([prefix] if prefix else [], [suffix] if suffix else [], candidates, layer_count, rules)


def quickest_replacements(
    kept: Sequence[Placed | None],
    candidates: Sequence[Candidate],
    excluded: frozenset[bytes],
    layer_count: int,
    rules: RouteRules = _ANYTHING,
) -> list[list[Placed]] | None:
    """In place of `replace_gaps`: for each place what stands there now; neighbouring losses are covered under the first of them.

    All stages together are at most `max_shards`; gaps are filled from the front, each leaving one shard to those behind it.
    """
    groups: list[list[Placed]] = [[placed] if placed is not None else [] for placed in kept]
    gaps = _gaps(kept)
    room = rules.max_shards - sum(placed is not None for placed in kept)
    for number, (first, stop) in enumerate(gaps):
        before = kept[first - 1] if first > 0 else None
        after = kept[stop] if stop < len(kept) else None
        wanted = Stage(
            before.stage.stop if before is not None else 0,
            after.stage.start if after is not None else layer_count,
            before is None,
            after is None,
        )
        later = len(gaps) - number - 1
        limits = msgspec.structs.replace(rules, max_shards=room - later, excluded=rules.excluded | excluded)
        cover = quickest_cover(candidates, wanted, limits, _node(before), _node(after))
        if cover is None:
            return None
        groups[first] = cover
        room -= len(cover)
    return groups


def route(
    candidates: Sequence[Candidate], own: Sequence[Placed], layer_count: int, rules: RouteRules = _ANYTHING
) -> Route | None:
    """As `quickest_around`, with a stand-in named for each stage that is not one's own."""
    stages = quickest_around(candidates, own, layer_count, rules)
    if stages is None:
        return None
    seconds = route_seconds(candidates, stages, rules)
    own_stages = {id(placed) for placed in own}
    prepared = Prepared(candidates, rules)
    standbys = tuple(() if id(each) in own_stages else _standby(prepared, each) for each in stages)
    return Route(tuple(stages), standbys, seconds)


def standby(candidates: Sequence[Candidate], placed: Placed, rules: RouteRules = _ANYTHING) -> tuple[Placed, ...]:
    """Who takes over if this stage's node goes: one holder or several. Spares are for that, and count like others here."""
    return _standby(Prepared(candidates, rules), placed)


def _standby(prepared: Prepared, placed: Placed) -> tuple[Placed, ...]:
    others, most = prepared.without(placed.node), prepared.rules.max_shards
    found = shortest_path(prepared, placed.stage, None, None, most, others, is_spare_equal=True)
    return tuple(found or ())


def route_seconds(candidates: Sequence[Candidate], stages: Sequence[Placed], rules: RouteRules = _ANYTHING) -> float:
    """What these stages are expected to take for one token; stages of nodes that are no candidates (one's own) cost their `step_us`."""
    total, before = 0.0, None
    for placed in stages:
        holders = [each for each in candidates if each.node == placed.node and holds(each.stage, placed.stage)]
        if holders:
            total += min(entry_s(each, before, rules) + work_s(each, placed.stage) for each in holders)
        else:
            total += placed.step_us / 1e6
        before = placed.node
    last = next((each for each in candidates if stages and each.node == stages[-1].node), None)
    return total + (leave_s(last, None, rules) if last is not None else 0.0)


def between_own(candidates: Sequence[Candidate], own: Sequence[Placed]) -> list[Candidate]:
    """One's own ends, and of what others offer only what lies between them: what is kept at home stays there."""
    prefix = next((placed.stage for placed in own if placed.stage.has_embedding), None)
    suffix = next((placed.stage for placed in own if placed.stage.has_output), None)
    mine = {placed.node for placed in own}
    found = [
        Candidate(placed.node, placed.address, placed.stage, is_local=True, arithmetic=placed.arithmetic)
        for placed in own
    ]
    for each in candidates:
        stage = Stage(
            max(each.stage.start, prefix.stop) if prefix is not None else each.stage.start,
            min(each.stage.stop, suffix.start) if suffix is not None else each.stage.stop,
            each.stage.has_embedding and prefix is None,
            each.stage.has_output and suffix is None,
        )
        if each.node not in mine and (stage.start < stage.stop or stage.has_output):
            found.append(msgspec.structs.replace(each, stage=stage))
    return found


def are_held(stages: Sequence[Placed], candidates: Sequence[Candidate]) -> bool:
    """Whether each of these stages is still on offer where it was, by a node with a stream to spare."""
    return all(
        any(each.node == placed.node and holds(each.stage, placed.stage) and not each.is_full for each in candidates)
        for placed in stages
    )


def _gaps(kept: Sequence[Placed | None]) -> list[tuple[int, int]]:
    """Runs of lost places, half-open."""
    gaps, place = [], 0
    for is_lost, run in itertools.groupby(kept, key=lambda placed: placed is None):
        length = len(list(run))
        if is_lost:
            gaps.append((place, place + length))
        place += length
    return gaps


def _between(
    head: list[Placed], tail: list[Placed], candidates: Sequence[Candidate], layer_count: int, rules: RouteRules
) -> list[Placed] | None:
    wanted = Stage(head[0].stage.stop if head else 0, tail[0].stage.start if tail else layer_count, not head, not tail)
    if head and tail and wanted.start == wanted.stop:
        return [*head, *tail]
    limits = msgspec.structs.replace(rules, max_shards=rules.max_shards - len(head) - len(tail))
    before, after = head[0].node if head else None, tail[0].node if tail else None
    middle = quickest_cover(candidates, wanted, limits, before, after)
    return None if middle is None else [*head, *middle, *tail]


def _node(placed: Placed | None) -> bytes | None:
    return None if placed is None else placed.node
