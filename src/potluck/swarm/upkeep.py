"""What a node does next to hold what the plan wants it to hold: fetch, load, drain, drop. Pure; whoever calls it does the work.

The new range is loaded before the old one is given up, no layer is given up that nobody else serves, and sessions that run on a
shard keep it until they end.
"""

import enum
from collections.abc import Callable, Sequence

import msgspec

from potluck.wire.messages import Stage


class ShardPhase(enum.StrEnum):
    """LOADING → SERVING → DRAINING (no new sessions) → gone; DRAINING → SERVING where the plan wants it again."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Held(msgspec.Struct, frozen=True):
    """A shard that this node has, or is about to have."""

    stage: Stage
    phase: ShardPhase
    sessions: int


class Deed(enum.StrEnum):
    FETCH = "fetch"  # its weights, from peers or from outside
    LOAD = "load"
    DRAIN = "drain"
    RESUME = "resume"
    DROP = "drop"


class Action(msgspec.Struct, frozen=True):
    deed: Deed
    stage: Stage


def next_actions(
    wanted: Stage | None, held: Sequence[Held], *, has_weights: Callable[[Stage], bool],
    is_served_elsewhere: Callable[[Stage], bool], fetching: Stage | None,
) -> list[Action]:  # fmt: skip
    """`is_served_elsewhere`: whether other nodes serve all of these layers right now."""
    actions = [Action(Deed.DROP, shard.stage) for shard in held if _is_empty(shard)]
    mine = next((shard for shard in held if shard.stage == wanted), None)
    if wanted is not None and (mine is None or _is_empty(mine)):
        actions += _obtain(wanted, has_weights, fetching)
    elif mine is not None and mine.phase is ShardPhase.DRAINING:
        actions.append(Action(Deed.RESUME, mine.stage))
    has_arrived = wanted is None or (mine is not None and mine.phase is ShardPhase.SERVING)
    for shard in held:
        is_old = shard.stage != wanted and shard.phase is ShardPhase.SERVING
        if is_old and has_arrived and all(is_served_elsewhere(part) for part in _without(shard.stage, wanted)):
            actions.append(Action(Deed.DRAIN, shard.stage))
    return actions


def _is_empty(shard: Held) -> bool:
    return shard.phase is ShardPhase.DRAINING and shard.sessions == 0


def _obtain(wanted: Stage, has_weights: Callable[[Stage], bool], fetching: Stage | None) -> list[Action]:
    if has_weights(wanted):
        return [Action(Deed.LOAD, wanted)]
    return [] if fetching == wanted else [Action(Deed.FETCH, wanted)]


def _without(stage: Stage, kept: Stage | None) -> list[Stage]:
    """What would no longer be served here: `stage` less `kept`."""
    if kept is None:
        return [stage]
    parts = []
    if stage.start < kept.start or (stage.has_embedding and not kept.has_embedding):
        parts.append(Stage(stage.start, min(stage.stop, kept.start), stage.has_embedding, False))
    if stage.stop > kept.stop or (stage.has_output and not kept.has_output):
        parts.append(Stage(max(stage.start, kept.stop), stage.stop, False, stage.has_output))
    return parts
