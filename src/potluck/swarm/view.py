"""The swarm as one node sees it at one moment: an immutable value made of unexpired adverts of members. Pure.

Whoever decides (planner, router, pages) gets a view and asks it; nothing in it changes afterwards.
"""

from collections.abc import Callable, Iterator

import msgspec

from potluck.core.layers import LayerRange
from potluck.swarm.adverts import Advert
from potluck.swarm.duplicates import Duplicate
from potluck.wire.messages import Described, ShardInfo


class Seen(msgspec.Struct, frozen=True):
    """A node's last advert, and what this node knows of it by itself."""

    advert: Advert
    first_seen_s: float  # of this advert; on the view's own clock
    expires_s: float
    is_own: bool = False
    is_connected: bool = False  # there is a link
    is_suspect: bool = False  # it did not answer, or its link broke, and this is being looked into
    rtt_us: int = 0  # as this node measures it; 0: not yet

    @property
    def address(self) -> str:
        return self.advert.addresses[0] if self.advert.addresses else ""


class Holder(msgspec.Struct, frozen=True):
    """A shard and who serves it."""

    node: bytes
    address: str
    shard: ShardInfo


class Offer(msgspec.Struct, frozen=True):
    """What `ShardStore.put` takes."""

    node: bytes
    address: str
    described: Described
    is_own: bool


class Served(msgspec.Struct, frozen=True):
    """A model of the swarm, and an arithmetic that its shards may compute by."""

    model: str
    weights_sha256: str
    arithmetic: int


class View(msgspec.Struct, frozen=True):
    """`is_sparse`: the swarm is too large for a link to everybody, so that a node without one is not thereby out of reach."""

    own: bytes
    made_s: float
    version: int  # a later view of the same node has a higher one
    nodes: dict[bytes, Seen]
    is_sparse: bool = False
    duplicates: tuple[Duplicate, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, node: bytes) -> bool:
        return node in self.nodes

    def is_usable(self, node: bytes) -> bool:
        """Whether work may be sent there: it is linked; or, where nobody has links to all, nothing speaks against it."""
        seen = self.nodes.get(node)
        if seen is None:
            return False
        return seen.is_own or seen.is_connected or (self.is_sparse and not seen.is_suspect and bool(seen.address))

    def usable(self) -> Iterator[Seen]:
        return (seen for node, seen in self.nodes.items() if self.is_usable(node))

    def trusting(self, may_serve: Callable[[bytes], bool], served: frozenset["Served"]) -> "View":
        """The same, less everything that whoever may not serve says it serves, and all models but those of the swarm.

        What plans, routes and fetches gets this one: no activation goes to a node for its own word alone.
        """
        nodes = {node: _trusting(seen, may_serve(node), served) for node, seen in self.nodes.items()}
        return msgspec.structs.replace(self, nodes=nodes)

    def holders(self, model: str, weights_sha256: str, layer: int | None = None) -> list[Holder]:
        """Shards of this model (with this layer) on nodes that can be used."""
        return [
            Holder(seen.advert.node, seen.address, shard)
            for seen in self.usable()
            for shard in seen.advert.shards
            if (shard.model, shard.weights_sha256) == (model, weights_sha256)
            and (layer is None or shard.stage.start <= layer < shard.stage.stop)
        ]

    def gaps(self, model: str, weights_sha256: str, layer_count: int) -> list[LayerRange]:
        """The layers that nobody holds."""
        held = [False] * layer_count
        for holder in self.holders(model, weights_sha256):
            for layer in range(holder.shard.stage.start, min(holder.shard.stage.stop, layer_count)):
                held[layer] = True
        return _runs_of_false(held)

    def has_ends(self, model: str, weights_sha256: str) -> tuple[bool, bool]:
        """Whether somebody holds the embedding, and somebody the output."""
        stages = [holder.shard.stage for holder in self.holders(model, weights_sha256)]
        return any(stage.has_embedding for stage in stages), any(stage.has_output for stage in stages)

    def models(self) -> dict[tuple[str, str], int]:
        """Name and hash of every model that somebody serves, with its number of layers."""
        shards = (shard for seen in self.usable() for shard in seen.advert.shards)
        return {(shard.model, shard.weights_sha256): shard.layer_count for shard in shards}

    def givers(self, weights_sha256: str, layer: int) -> list[bytes]:
        """Nodes that can hand out this layer's weights."""
        return [
            seen.advert.node
            for seen in self.usable()
            if not seen.is_own
            and any(
                held.weights_sha256 == weights_sha256 and any(start <= layer < stop for start, stop in held.ranges)
                for held in seen.advert.held
            )
        ]

    def offers(self) -> list[Offer]:
        """Everything that can be used now, as the shard store wants it. A draining node leaves out what it no longer offers."""
        return [
            Offer(seen.advert.node, seen.address, _described(seen.advert), seen.is_own)
            for seen in self.usable()
            if seen.advert.shards
        ]


def _trusting(seen: Seen, may_serve: bool, served: frozenset[Served]) -> Seen:
    advert = seen.advert
    if not may_serve:
        bare = msgspec.structs.replace(advert, shards=(), held=(), intended=(), allows_serving=False)
    else:
        shards = tuple(s for s in advert.shards if Served(s.model, s.weights_sha256, s.arithmetic) in served)
        bare = advert if len(shards) == len(advert.shards) else msgspec.structs.replace(advert, shards=shards)
    return seen if bare == advert else msgspec.structs.replace(seen, advert=bare)


def _described(advert: Advert) -> Described:
    return Described(0, advert.node, advert.software, advert.shards, 0, ())


def _runs_of_false(held: list[bool]) -> list[LayerRange]:
    runs, start = [], None
    for layer, is_held in enumerate([*held, True]):
        if is_held and start is not None:
            runs.append(LayerRange(start, layer))
            start = None
        elif not is_held and start is None:
            start = layer
    return runs
