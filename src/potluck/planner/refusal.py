"""Why a model cannot be placed: how many bytes are missing, and which limit, lifted alone, would let it fit. Pure."""

import msgspec

from potluck.core.errors import PlacementImpossible
from potluck.core.layers import LayerRange
from potluck.planner.arrangement import Swarm
from potluck.planner.costs import NodeOffer

_NEWCOMER = b""  # no node has this id


def refusal(swarm: Swarm) -> PlacementImpossible:
    """The error to raise. The bytes are the fewest with which it would work: more on nodes that are there, or on one newcomer."""
    missing = _missing_bytes(_with_newcomer(swarm))
    others = tuple(name for name, lifted in _lifted(swarm) if lifted != swarm and _is_possible(lifted))
    model = swarm.tables.model
    message = f"{model.model} does not fit: {missing / 1e6:,.1f} MB ({missing} bytes) of memory are missing"
    untrusted = sum(not offer.is_trusted for offer in swarm.offers)
    if not swarm.offers:
        message += "; no node offers any"
    elif untrusted == len(swarm.offers):
        message += f"; none of the {untrusted} nodes is trusted to serve"
    if others:
        message += f"; it would fit without {' or without '.join(_WORDS[name] for name in others)}"
    return PlacementImpossible(message, missing, (*others, "memory"))


_WORDS = {
    "trust": "the limit to trusted nodes",
    "pins": "the pinned ranges",
    "layer caps": "the caps on layers",
    "shard limit": "the limit on shards per request",
}


def _missing_bytes(swarm: Swarm) -> int:
    every = LayerRange(0, swarm.tables.layer_count)
    windows = [_window(offer, every) if offer.is_trusted else None for offer in swarm.offers]
    found = swarm.least_missing(windows)
    assert found is not None, "a newcomer can hold everything"
    return int(found.cost)


def _window(offer: NodeOffer, every: LayerRange) -> LayerRange | None:
    if offer.pinned is None:
        return every
    is_possible = offer.pinned.stop <= every.stop and (
        offer.max_layers is None or len(offer.pinned) <= offer.max_layers
    )
    return offer.pinned if is_possible else None


def _with_newcomer(swarm: Swarm) -> Swarm:
    newcomer = NodeOffer(node=_NEWCOMER, free_bytes=0, layer_s=1.0, max_streams=swarm.tables.model.streams)
    return _with_offers(swarm, (newcomer, *swarm.offers))


def _with_offers(swarm: Swarm, offers: tuple[NodeOffer, ...], max_stages: int | None = None) -> Swarm:
    return Swarm(swarm.tables, offers, swarm.links, swarm.objective, max_stages or swarm.max_stages)


def _lifted(swarm: Swarm) -> list[tuple[str, Swarm]]:
    def each(**changes: object) -> Swarm:
        return _with_offers(swarm, tuple(msgspec.structs.replace(offer, **changes) for offer in swarm.offers))

    return [
        ("trust", each(is_trusted=True)),
        ("pins", each(pinned=None)),
        ("layer caps", each(max_layers=None)),
        ("shard limit", _with_offers(swarm, swarm.offers, max(swarm.max_stages, len(swarm.offers)))),
    ]


def _is_possible(swarm: Swarm) -> bool:
    return swarm.best(swarm.free_windows()) is not None
