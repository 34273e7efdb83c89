"""What placement weighs: a model's bytes, what each node offers, and the links between them. Immutable, no I/O, no clock."""

import math
from collections.abc import Mapping

import msgspec

from potluck.core.layers import LayerRange
from potluck.wire.messages import Stage


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The real bytes of one model, and the KV that every holder of a layer sets aside for `context_tokens` of `streams` sessions."""

    model: str
    weights_sha256: str
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    output_bytes: int  # of a tied output: what a holder without the embedding must load
    is_output_tied: bool = False  # one tensor is both: whoever holds both ends pays once, as embedding_bytes
    kv_bytes_per_token: int  # of one layer
    context_tokens: int
    streams: int = 1
    activation_bytes: int = 0  # one token's hidden state on a link
    device_growth: float = 1.0  # how much more its weights take on a GPU than here

    @property
    def layer_count(self) -> int:
        return len(self.layer_bytes)

    @property
    def total_bytes(self) -> int:
        """The weights of the whole model on one machine."""
        return self.weight_bytes(Stage(0, self.layer_count, True, True))

    def weight_bytes(self, stage: Stage) -> int:
        """What a holder of `stage` loads."""
        ends = self.embedding_bytes if stage.has_embedding else 0
        if stage.has_output and not (self.is_output_tied and stage.has_embedding):
            ends += self.output_bytes
        return sum(self.layer_bytes[stage.start : stage.stop]) + ends

    def kv_bytes(self, streams: int) -> int:
        """What each layer sets aside on a node that takes at most `streams` sessions."""
        return self.kv_bytes_per_token * self.context_tokens * min(self.streams, streams)

    def need_bytes(self, stage: Stage) -> int:
        """What a holder of `stage` needs: weights, and the KV of all streams."""
        return self.weight_bytes(stage) + (stage.stop - stage.start) * self.kv_bytes(self.streams)


class NodeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What one node brings. `free_bytes` is what is free now; the planner adds `held_bytes` and subtracts `reserve_bytes` itself."""

    node: bytes
    free_bytes: int
    held_bytes: int = 0  # taken now by what it holds of this model: free again when that goes
    reserve_bytes: int = 0  # stays free for the machine's owner
    layer_s: float  # one token through a layer of average size, measured
    embedding_s: float = 0.0
    output_s: float = 0.0
    max_streams: int = 1
    is_trusted: bool = True  # may serve shards here
    pinned: LayerRange | None = None  # holds exactly this, or nothing
    max_layers: int | None = None
    current: Stage | None = None  # what it holds now

    @property
    def budget_bytes(self) -> int:
        """For weights and KV together."""
        return max(0, self.free_bytes + self.held_bytes - self.reserve_bytes)


class Link(msgspec.Struct, frozen=True):
    """One direction between two nodes, as measured. Figures that cannot be (negative, not a number) make a link unusable."""

    round_trip_s: float = 0.001
    bytes_per_s: float = 100e6

    def hop_s(self, payload_bytes: int) -> float:
        return self.round_trip_s / 2 + self.busy_s(payload_bytes) if self.round_trip_s >= 0 else math.inf

    def busy_s(self, payload_bytes: int) -> float:
        """How long the link carries nothing else."""
        return payload_bytes / self.bytes_per_s if self.bytes_per_s > 0 else math.inf


class Links(msgspec.Struct, frozen=True):
    """Links by (from, to); `default` where nothing was measured.

    `entry` is the head: tokens go from it to the first stage and come back to it from the last. None: whoever asks, so the way back is
    from the last stage to the first, as on the ring; every node then comes to the same plan.
    """

    default: Link = Link()
    pairs: Mapping[tuple[bytes, bytes], Link] = {}
    entry: bytes | None = None

    def hop_s(self, source: bytes, target: bytes, payload_bytes: int) -> float:
        return 0.0 if source == target else self.pairs.get((source, target), self.default).hop_s(payload_bytes)

    def busy_s(self, source: bytes, target: bytes, payload_bytes: int) -> float:
        return 0.0 if source == target else self.pairs.get((source, target), self.default).busy_s(payload_bytes)
