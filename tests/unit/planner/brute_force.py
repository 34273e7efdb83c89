"""Small random swarms, and every arrangement of them, by plain loops over what the words say: nothing of the planner's code."""

import itertools
import math
import random
from collections.abc import Iterator

from potluck.core.layers import LayerRange
from potluck.planner.costs import Link, Links, ModelCosts, NodeOffer
from potluck.wire.messages import Stage

Arrangement = list[tuple[NodeOffer, int, int]]


def node_id(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def random_model(draw: random.Random, most_layers: int = 6) -> ModelCosts:
    layers = draw.randint(1, most_layers)
    sizes = [draw.randint(50, 150) for _ in range(layers)] if draw.random() < 0.5 else [100] * layers
    end = draw.choice([0, 60, 300])
    return ModelCosts(
        model="random",
        weights_sha256="0" * 64,
        layer_bytes=tuple(sizes),
        embedding_bytes=end,
        output_bytes=end if draw.random() < 0.7 else 80,
        is_output_tied=end > 0 and draw.random() < 0.5,
        kv_bytes_per_token=draw.choice([0, 1]),
        context_tokens=draw.choice([10, 40]),
        streams=draw.choice([1, 2, 4]),
        activation_bytes=draw.choice([0, 1000]),
    )


def random_offers(
    draw: random.Random, model: ModelCosts, most_nodes: int = 4, is_free: bool = False
) -> list[NodeOffer]:
    count = draw.randint(1, most_nodes)
    share = draw.choice([1.0, 2.0, 4.0]) * model.total_bytes / count
    return [_random_offer(draw, model, number, share, is_free) for number in draw.sample(range(1, 200), count)]


def _random_offer(draw: random.Random, model: ModelCosts, number: int, share: float, is_free: bool) -> NodeOffer:
    layers = model.layer_count
    lo = draw.randrange(layers)
    pinned = LayerRange(lo, draw.randint(lo + 1, layers)) if draw.random() < 0.12 and not is_free else None
    return NodeOffer(
        node=node_id(number),
        free_bytes=int(share * draw.uniform(0.3, 1.8)),
        held_bytes=draw.choice([0, 100]),
        reserve_bytes=draw.choice([0, 50]),
        layer_s=draw.choice([0.001, 0.002, 0.005]) * draw.uniform(0.8, 1.2),
        embedding_s=draw.choice([0.0, 0.0005]),
        output_s=draw.choice([0.0, 0.003]),
        max_streams=draw.choice([1, 2, 8]),
        is_trusted=is_free or draw.random() < 0.9,
        pinned=pinned,
        max_layers=draw.randint(1, layers) if draw.random() < 0.15 and not is_free else None,
        current=_random_stage(draw, layers) if draw.random() < 0.4 else None,
    )


def _random_stage(draw: random.Random, layers: int) -> Stage:
    lo = draw.randrange(layers)
    hi = draw.randint(lo + 1, layers)
    return Stage(lo, hi, lo == 0, hi == layers)


def random_links(draw: random.Random, nodes: list[bytes]) -> Links:
    default = Link(draw.choice([0.0004, 0.004, 0.02]), draw.choice([1e6, 1e8]))
    pairs = {}
    if draw.random() < 0.6:
        for a, b in itertools.permutations(nodes, 2):
            if draw.random() < 0.7:
                pairs[a, b] = Link(draw.uniform(0.0002, 0.03), draw.choice([1e5, 1e7, 1e9]))
    return Links(default, pairs, draw.choice([None, None, draw.choice(nodes), b"elsewhere"]))


# ---------------------------------------------------------------- every arrangement


def arrangements(model: ModelCosts, offers: list[NodeOffer], max_stages: int = 16) -> Iterator[Arrangement]:
    """All chains that trust, pins and caps allow, memory aside."""
    usable = [offer for offer in offers if offer.is_trusted]
    for size in range(1, min(len(usable), model.layer_count, max_stages) + 1):
        for nodes in itertools.permutations(usable, size):
            for cuts in itertools.combinations(range(1, model.layer_count), size - 1):
                bounds = [0, *cuts, model.layer_count]
                chain = list(zip(nodes, bounds, bounds[1:], strict=False))
                if all(_is_allowed(model, *part) for part in chain):
                    yield chain


def _is_allowed(model: ModelCosts, offer: NodeOffer, start: int, stop: int) -> bool:
    most = model.layer_count if offer.max_layers is None else offer.max_layers
    if offer.pinned is None:
        return stop - start <= most
    is_within = offer.pinned.start <= start and stop <= offer.pinned.stop <= model.layer_count
    return is_within and len(offer.pinned) <= most


def needed_bytes(model: ModelCosts, offer: NodeOffer, start: int, stop: int) -> int:
    if offer.pinned is not None:
        start, stop = offer.pinned.start, offer.pinned.stop
    kv = model.kv_bytes_per_token * model.context_tokens * min(model.streams, offer.max_streams)
    has_embedding, has_output = start == 0, stop == model.layer_count
    total = sum(model.layer_bytes[start:stop]) + kv * (stop - start)
    if has_embedding:
        total += model.embedding_bytes
    if has_output and not (has_embedding and model.is_output_tied):
        total += model.output_bytes
    return total


def missing_bytes(model: ModelCosts, chain: Arrangement) -> int:
    return sum(max(0, needed_bytes(model, *part) - part[0].budget_bytes) for part in chain)


def stage_s(model: ModelCosts, offer: NodeOffer, start: int, stop: int) -> float:
    average = sum(model.layer_bytes) / model.layer_count
    seconds = offer.layer_s * sum(model.layer_bytes[start:stop]) / average
    seconds += offer.embedding_s if start == 0 else 0.0
    return seconds + (offer.output_s if stop == model.layer_count else 0.0)


def latency_s(model: ModelCosts, links: Links, chain: Arrangement) -> float:
    nodes = [offer.node for offer, _, _ in chain]
    total = sum(stage_s(model, *part) for part in chain)
    total += sum(links.hop_s(a, b, model.activation_bytes) for a, b in itertools.pairwise(nodes))
    if links.entry is None:
        return total + links.hop_s(nodes[-1], nodes[0], 0)
    return total + links.hop_s(links.entry, nodes[0], 0) + links.hop_s(nodes[-1], links.entry, 0)


def slowest_s(model: ModelCosts, links: Links, chain: Arrangement) -> float:
    nodes = [offer.node for offer, _, _ in chain]
    wires = [links.busy_s(a, b, model.activation_bytes) for a, b in itertools.pairwise(nodes)]
    return max([*wires, *(stage_s(model, *part) for part in chain)])


def best_by_brute_force(model: ModelCosts, offers: list[NodeOffer], links: Links, objective: str) -> float:
    """Infinite where nothing fits."""
    measure = latency_s if objective == "latency" else slowest_s
    fitting = (chain for chain in arrangements(model, offers) if missing_bytes(model, chain) == 0)
    return min((measure(model, links, chain) for chain in fitting), default=math.inf)


def fewest_missing_bytes(model: ModelCosts, offers: list[NodeOffer]) -> int:
    """With one newcomer who brings nothing yet, and may hold anything."""
    newcomer = NodeOffer(node=b"newcomer", free_bytes=0, layer_s=1.0, max_streams=model.streams)
    return min(missing_bytes(model, chain) for chain in arrangements(model, [*offers, newcomer]))
