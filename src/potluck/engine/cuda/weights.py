"""The tensors of one shard on a device: what reads the same rows is joined into one matrix. Touches no other tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.engine.cuda.matrices import Matrix, joined, read_matrix, read_vector
from potluck.weights.checkpoint import Checkpoint


class WeightSource(Protocol):
    """Where tensors come from: a file, or a random generator on the device."""

    def matrix(self, name: str) -> Matrix: ...

    def vector(self, name: str) -> torch.Tensor | None: ...


class CheckpointSource:
    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device

    def matrix(self, name: str) -> Matrix:
        matrix = read_matrix(self._checkpoint, name, self._device)
        self._checkpoint.forget(name)
        return matrix

    def vector(self, name: str) -> torch.Tensor | None:
        if name not in self._checkpoint.tensors:
            return None
        return read_vector(self._checkpoint, name, self._device)


@dataclass(frozen=True)
class LayerWeights:
    """`query_key_value` and `gate_up` are one matrix where the parts are of one kind, several otherwise, in order."""

    query_key_value: Sequence[Matrix]
    query_key_value_bias: torch.Tensor | None
    attention_output: Matrix
    attention_output_bias: torch.Tensor | None
    gate_up: Sequence[Matrix]
    down: Matrix
    attention_norm: torch.Tensor
    feed_forward_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    post_feed_forward_norm: torch.Tensor | None

    @property
    def matrices(self) -> list[Matrix]:
        return [*self.query_key_value, self.attention_output, *self.gate_up, self.down]


class ShardWeights:
    def __init__(
        self, facts: ModelFacts, source: WeightSource, layers: LayerRange | None, *, has_embedding: bool, has_output: bool
    ) -> None:  # fmt: skip
        self.facts, self._source = facts, source
        self.layers = {layer: self._load(f"layers.{layer}.") for layer in layers or ()}
        self.embedding: Matrix | None = None
        if has_embedding or (has_output and facts.is_output_tied):
            self.embedding = source.matrix("embedding")
        self.output: Matrix | None = None
        self.output_norm: torch.Tensor | None = None
        if has_output:
            self.output = self.embedding if facts.is_output_tied else source.matrix("output")
            self.output_norm = source.vector("output_norm")

    def _load(self, prefix: str) -> LayerWeights:
        facts, source = self.facts, self._source
        fused = facts.has_fused_query_key_value
        roles = ("query_key_value",) if fused else ("query", "key", "value")
        biases = [source.vector(f"{prefix}{role}_bias") for role in ("query", "key", "value")]
        given = [bias for bias in biases if bias is not None]
        feed_forward = ("gate_up",) if facts.has_fused_gate_up else ("gate", "up")
        return LayerWeights(
            query_key_value=self._together(prefix, roles),
            query_key_value_bias=torch.cat(given) if given else None,
            attention_output=source.matrix(f"{prefix}attention_output"),
            attention_output_bias=source.vector(f"{prefix}attention_output_bias"),
            gate_up=self._together(prefix, feed_forward),
            down=source.matrix(f"{prefix}down"),
            attention_norm=self._norm(prefix + "attention_norm"),
            feed_forward_norm=self._norm(prefix + "feed_forward_norm"),
            query_norm=source.vector(prefix + "query_norm"),
            key_norm=source.vector(prefix + "key_norm"),
            post_attention_norm=source.vector(prefix + "post_attention_norm"),
            post_feed_forward_norm=source.vector(prefix + "post_feed_forward_norm"),
        )

    def _norm(self, name: str) -> torch.Tensor:
        vector = self._source.vector(name)
        assert vector is not None
        return vector

    def _together(self, prefix: str, roles: Sequence[str]) -> list[Matrix]:
        parts = [self._source.matrix(prefix + role) for role in roles]
        whole = joined(parts)
        return parts if whole is None else [whole]

    @property
    def size_bytes(self) -> int:
        matrices = [matrix for layer in self.layers.values() for matrix in layer.matrices]
        ends = {id(each): each for each in (self.embedding, self.output) if each is not None}
        return sum(each.size_bytes for each in [*matrices, *ends.values()])
