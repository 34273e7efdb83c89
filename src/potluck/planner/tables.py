"""Costs of every range on every node as arrays, for the chain solver: seconds, bytes needed, bytes to load. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from potluck.core.layers import LayerRange
from potluck.planner.costs import Link, Links, ModelCosts, NodeOffer
from potluck.wire.messages import Stage

Costs = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int64]
Allowed = npt.NDArray[np.bool_]

_MOST_BYTES = 1 << 60  # offers come from elsewhere: what is larger counts as this


class ModelTables:
    """Tables over [start, stop] of one model. The ends go with the layers beside them: range 0… has the embedding, …L the output."""

    def __init__(self, model: ModelCosts) -> None:
        self.model = model
        self.layer_count = count = model.layer_count
        self._starts, self._stops = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
        self._lengths = self._stops - self._starts
        self.is_range: Allowed = self._lengths > 0
        self._prefix = np.cumsum(np.array((0, *model.layer_bytes), np.int64))
        self._work = self._prefix * (count / max(1, int(self._prefix[-1])))  # in layers of average size
        self._layers_work: Costs = self._work[None, :] - self._work[:, None]
        self.weights: Bytes = self._prefix[None, :] - self._prefix[:, None]
        self.weights[0, :] += model.embedding_bytes
        self.weights[:, count] += model.output_bytes
        if model.is_output_tied:
            self.weights[0, count] -= model.output_bytes
        self._needs: dict[int, Bytes] = {}

    def stage(self, start: int, stop: int) -> Stage:
        return Stage(start, stop, start == 0, stop == self.layer_count)

    def need(self, offer: NodeOffer) -> Bytes:
        """Weights and KV of each range on this node."""
        kv = self.model.kv_bytes(offer.max_streams)
        if kv not in self._needs:
            self._needs[kv] = self.weights + kv * self._lengths
        return self._needs[kv]

    def budget(self, offer: NodeOffer) -> int:
        return min(offer.budget_bytes, _MOST_BYTES)

    def seconds(self, offer: NodeOffer) -> Costs:
        """One token through each range."""
        seconds = offer.layer_s * self._layers_work
        seconds[0, :] += offer.embedding_s
        seconds[:, self.layer_count] += offer.output_s
        return seconds

    def inside(self, window: LayerRange | None) -> Allowed:
        if window is None:
            return self.is_range
        return self.is_range & (self._starts >= window.start) & (self._stops <= window.stop)

    def fits(self, offer: NodeOffer) -> Allowed:
        """Ranges that this node has the memory for and is allowed to hold; a pinned node any part of its pinned range."""
        if offer.pinned is not None:
            is_possible = self.pin_problem(offer) is None
            return self.inside(offer.pinned) if is_possible else np.zeros_like(self.is_range)
        return self.under_cap(offer) & (self.need(offer) <= self.budget(offer))

    def under_cap(self, offer: NodeOffer) -> Allowed:
        return self.is_range if offer.max_layers is None else self.is_range & (self._lengths <= offer.max_layers)

    def pin_problem(self, offer: NodeOffer) -> str | None:
        """Why a pinned range cannot be held; None where it can, or where nothing is pinned."""
        pinned = offer.pinned
        if pinned is None:
            return None
        if pinned.stop > self.layer_count:
            return f"pinned to {pinned}, but the model has layers 0-{self.layer_count - 1}"
        if offer.max_layers is not None and len(pinned) > offer.max_layers:
            return f"pinned to {pinned}, which is more than its cap of {offer.max_layers} layers"
        missing = self.missing(offer, pinned)
        return f"pinned to {pinned}, for which {missing} bytes of memory are missing" if missing > 0 else None

    def missing(self, offer: NodeOffer, layers: LayerRange) -> int:
        return int(self.need(offer)[layers.start, layers.stop]) - self.budget(offer)

    def to_load(self, offer: NodeOffer) -> Bytes:
        """Weights of each range that the node does not hold yet."""
        held = offer.current
        if held is None:
            return self.weights
        has_table = held.has_embedding or (self.model.is_output_tied and held.has_output)
        start = np.clip(self._starts, held.start, min(held.stop, self.layer_count))
        stop = np.clip(self._stops, held.start, min(held.stop, self.layer_count))
        load: Bytes = self.weights - np.maximum(0, self._prefix[stop] - self._prefix[start])
        if has_table:
            load[0, :] -= self.model.embedding_bytes
        has_output = has_table if self.model.is_output_tied else held.has_output
        if has_output:
            load[:, self.layer_count] -= self.model.output_bytes
            if self.model.is_output_tied:
                load[0, self.layer_count] += self.model.output_bytes
        return load


@dataclass(frozen=True)
class LinkTables:
    """Between nodes in the order given; `entry` and `leave` are the head's links to and from each, `back` the ring's without a head."""

    hops: Costs
    busy: Costs
    entry: Costs
    leave: Costs
    back: Costs | None


def link_tables(links: Links, nodes: Sequence[bytes], activation_bytes: int) -> LinkTables:
    between = _known_pairs(links, nodes)
    default, nothing = links.default, np.zeros(len(nodes))

    def table(of_default: float, of_pairs: list[float]) -> Costs:
        values = np.full((len(nodes), len(nodes)), of_default)
        for (i, j, _), value in zip(between, of_pairs, strict=True):
            values[i, j] = value
        np.fill_diagonal(values, 0.0)
        return values

    hops = table(default.hop_s(activation_bytes), [link.hop_s(activation_bytes) for _, _, link in between])
    busy = table(default.busy_s(activation_bytes), [link.busy_s(activation_bytes) for _, _, link in between])
    if links.entry is None:
        back = table(default.hop_s(0), [link.hop_s(0) for _, _, link in between])
        return LinkTables(hops, busy, nothing, nothing, back)
    entry = np.array([links.hop_s(links.entry, node, 0) for node in nodes])
    leave = np.array([links.hop_s(node, links.entry, 0) for node in nodes])
    return LinkTables(hops, busy, entry, leave, None)


def _known_pairs(links: Links, nodes: Sequence[bytes]) -> list[tuple[int, int, Link]]:
    place = {node: index for index, node in enumerate(nodes)}
    if len(nodes) ** 2 < len(links.pairs):  # a pool out of a large swarm
        pairs = [(a, b) for a in nodes for b in nodes if (a, b) in links.pairs]
    else:
        pairs = [(a, b) for a, b in links.pairs if a in place and b in place]
    return [(place[a], place[b], links.pairs[a, b]) for a, b in pairs]
