"""The swarm as the planner wants it: a model's costs from its manifest, offers and links from a view. Pure.

Every node makes the same of the same view, so that all come to the same plan without asking each other.
"""

from collections.abc import Callable, Mapping

from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.planner.costs import Link, Links, ModelCosts, NodeOffer
from potluck.swarm.adverts import CPU, Advert
from potluck.swarm.view import View
from potluck.trust.records import ServedModel
from potluck.weights.device_memory import device_growth
from potluck.weights.manifest import Manifest
from potluck.weights.units import EMBEDDING, OUTPUT, cut_into_units, layer_unit
from potluck.wire.messages import Stage

_FLOAT_FORMATS = ("F32", "BF16", "F16")
_GUESSED_BYTES_PER_S = 8e9  # of a machine that has not said how fast it is
_KV_PAGE_TOKENS = 64  # as the engine has it
_LEAST_KV_BYTES = 64 << 20
_UNKNOWN_LINK = Link(round_trip_s=0.001, bytes_per_s=100e6)


def model_costs(manifest: Manifest, record: ServedModel) -> ModelCosts:
    facts, units = manifest.facts, cut_into_units(manifest)
    embedding_bytes = units[EMBEDDING].size_bytes
    output_bytes = units[OUTPUT].size_bytes + (embedding_bytes if facts.is_output_tied else 0)
    return ModelCosts(
        model=record.subject, weights_sha256=record.weights_sha256,
        layer_bytes=tuple(units[layer_unit(layer)].size_bytes for layer in range(facts.layer_count)),
        embedding_bytes=embedding_bytes, output_bytes=output_bytes, is_output_tied=facts.is_output_tied,
        kv_bytes_per_token=kv_bytes_per_token(facts, manifest), context_tokens=min(record.context_tokens, facts.context_length),
        streams=record.streams, activation_bytes=4 * facts.hidden_size,
        device_growth=device_growth({each.name: each for each in manifest.tensors}),
    )  # fmt: skip


def kv_bytes_per_token(facts: ModelFacts, manifest: Manifest) -> int:
    """Of one layer: keys and values, as halves for quantised models and as floats for others."""
    is_float = all(record.format in _FLOAT_FORMATS for record in manifest.tensors)
    return 2 * facts.kv_head_count * facts.head_size * (4 if is_float else 2)


def kv_budget_bytes(costs: ModelCosts, stage: Stage, memory_budget_bytes: int) -> int:
    """What the plan set aside for sessions on this stage, each with the page that it does not fill; a little more for small models."""
    tokens = (costs.context_tokens + _KV_PAGE_TOKENS) * costs.streams
    planned_bytes = (stage.stop - stage.start) * costs.kv_bytes_per_token * tokens
    room_bytes = max(0, memory_budget_bytes - costs.weight_bytes(stage))
    return max(planned_bytes, min(_LEAST_KV_BYTES, room_bytes))


def node_offers(
    view: View, costs: ModelCosts, may_serve: Callable[[bytes], bool], taken_bytes: Mapping[bytes, int] | None = None
) -> list[NodeOffer]:
    """Whoever is reachable, wants to serve, can load this model and is not about to leave.

    `taken_bytes`: by node, what other models have there.
    """
    taken = taken_bytes or {}
    adverts = [seen.advert for seen in view.usable()]
    return [
        _offer(advert, costs, may_serve(advert.node), taken.get(advert.node, 0))
        for advert in adverts
        if advert.allows_serving
        and costs.weights_sha256 not in advert.unwell
        and not (advert.is_draining or advert.is_leaving)
    ]


def _offer(advert: Advert, costs: ModelCosts, is_trusted: bool, taken_bytes: int) -> NodeOffer:
    layer_us = next((s.layer_us for s in advert.speeds if s.weights_sha256 == costs.weights_sha256), 0)
    average_bytes = sum(costs.layer_bytes) / costs.layer_count
    layer_s = layer_us / 1e6 if layer_us else average_bytes / _GUESSED_BYTES_PER_S
    pinned = LayerRange(*advert.pinned) if advert.pinned is not None else None
    fits = pinned is None or pinned.stop <= costs.layer_count
    # On a GPU some formats take more than in the file; the planner counts the file's bytes.
    growth = costs.device_growth if advert.device != CPU else 1.0
    return NodeOffer(
        node=advert.node, free_bytes=int(max(0, advert.memory_budget_bytes - taken_bytes) / growth), layer_s=layer_s,
        output_s=layer_s * costs.output_bytes / average_bytes, max_streams=costs.streams, is_trusted=is_trusted and fits,
        pinned=pinned if fits else None, max_layers=advert.max_layers or None, current=current_stage(advert, costs),
    )  # fmt: skip


def current_stage(advert: Advert, costs: ModelCosts) -> Stage | None:
    """What a node is about to serve, or else the widest range of the model that it serves now."""
    intended = [
        held.ranges[0] for held in advert.intended if held.weights_sha256 == costs.weights_sha256 and held.ranges
    ]
    stages = [Stage(start, stop, start == 0, stop == costs.layer_count) for start, stop in intended]
    stages = stages or [shard.stage for shard in advert.shards if shard.weights_sha256 == costs.weights_sha256]
    return max(stages, key=lambda stage: stage.stop - stage.start, default=None)


def links_of(view: View) -> Links:
    pairs = {}
    for seen in view.usable():
        for figures in seen.advert.links:
            bandwidth = figures.bandwidth_bytes_s or _UNKNOWN_LINK.bytes_per_s
            pairs[seen.advert.node, figures.node] = Link(figures.rtt_us / 1e6, bandwidth)
    return Links(_UNKNOWN_LINK, pairs)


def is_covered(view: View, costs: ModelCosts) -> bool:
    """Whether somebody serves every layer and both ends now."""
    has_embedding, has_output = view.has_ends(costs.model, costs.weights_sha256)
    return has_embedding and has_output and not view.gaps(costs.model, costs.weights_sha256, costs.layer_count)


def covers(stages: list[Stage], wanted: Stage) -> bool:
    """Whether these stages together have all that `wanted` has."""
    layers = all(any(s.start <= layer < s.stop for s in stages) for layer in range(wanted.start, wanted.stop))
    embedding = not wanted.has_embedding or any(stage.has_embedding for stage in stages)
    return layers and embedding and (not wanted.has_output or any(stage.has_output for stage in stages))
