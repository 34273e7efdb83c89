"""Who holds what of the swarm's models, by their plans and by what the nodes say. Pure: every node makes the same of the same view."""

from collections import Counter
from collections.abc import Iterable

from potluck.node.duty import ModelDuty
from potluck.swarm.view import View
from potluck.wire.messages import Stage


def taken_bytes(duties: Iterable[ModelDuty], duty: ModelDuty, view: View) -> Counter[bytes]:
    """What the models before this one take on each node; all nodes take the models in the same order."""
    taken: Counter[bytes] = Counter()
    for other in sorted(duties, key=lambda other: other.record.subject):
        if other is duty:
            break
        for node, stage in _placed(other, view):
            taken[node] += other.costs.need_bytes(stage)
    return taken


def _placed(duty: ModelDuty, view: View) -> list[tuple[bytes, Stage]]:
    """Where the plan has it; without one, where it is held all the same."""
    if duty.is_withdrawn:
        return []  # a node on which its sessions run on offers less memory as long as they do
    if duty.plan is not None:
        return list(duty.plan.placement)
    holders = view.holders(duty.costs.model, duty.costs.weights_sha256)
    return [(holder.node, holder.shard.stage) for holder in holders]


def planned_stages(duty: ModelDuty, view: View, own: bytes) -> list[Stage]:
    """What others serve now, awake or asleep, and are to keep; what they are about to give up as well does not count."""
    return [
        holder.shard.stage
        for holder in view.holders(duty.costs.model, duty.costs.weights_sha256)
        if holder.node != own
        and not view.nodes[holder.node].advert.is_draining
        and (duty.plan is None or duty.plan.stage_of(holder.node) == holder.shard.stage)
    ]
