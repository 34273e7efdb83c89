"""The one decoder, on a device: model facts and a shard's weights, as calls of `Operations`. No family has code of its own here."""

import torch

from potluck.core.model_facts import ModelFacts, Rotary
from potluck.engine.cuda.batches import AttentionFacts, Batch
from potluck.engine.cuda.kv_pages import DeviceKvCache
from potluck.engine.cuda.matrices import Matrix
from potluck.engine.cuda.operations import Operations, Unscaled
from potluck.engine.cuda.weights import LayerWeights, ShardWeights
from potluck.engine.rotary import RotaryTable


class Decoder:
    """Works on `hidden` in place: float32 rows in, float32 rows out."""

    def __init__(
        self, weights: ShardWeights, kv: DeviceKvCache, operations: Operations, first_layer: int, device: torch.device
    ) -> None:
        self.facts: ModelFacts = weights.facts
        self._weights, self._kv, self._do = weights, kv, operations
        tables = {rotary: _tables(rotary, kv.max_positions, device) for rotary in self._rotaries()}
        self._attention = {
            layer: self._attention_facts(layer, layer - first_layer, part, tables[self.facts.rotary_of(layer)])
            for layer, part in weights.layers.items()
        }

    def _rotaries(self) -> set[Rotary]:
        return {self.facts.rotary_of(layer) for layer in self._weights.layers}

    def _attention_facts(
        self, layer: int, place: int, part: LayerWeights, table: tuple[torch.Tensor, torch.Tensor]
    ) -> AttentionFacts:
        facts = self.facts
        rotary = facts.rotary_of(layer)
        return AttentionFacts(
            facts.head_count, facts.kv_head_count, facts.head_size, facts.attention_scale, facts.attention_soft_cap,
            facts.window_of(layer), facts.norm_epsilon, rotary.dimensions, rotary.form == "interleaved", *table,
            part.query_norm, part.key_norm, self._kv.keys[place], self._kv.values[place], self._kv.tables,
        )  # fmt: skip

    def transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Between the host's pinned memory and the device, queued like everything else."""
        self._do.transfer(source, target)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._weights.embedding is not None
        rows = self._weights.embedding.take(tokens)
        return rows if self.facts.embedding_scale is None else rows * self.facts.embedding_scale

    def run(self, hidden: torch.Tensor, batch: Batch, first: int, stop: int) -> None:
        """Layers first ≤ layer < stop."""
        unscaled: Unscaled | None = None
        for layer in range(first, stop):
            next_norm = self._weights.layers[layer + 1].attention_norm if layer + 1 < stop else None
            part, attention = self._weights.layers[layer], self._attention[layer]
            unscaled = self._layer(hidden, batch, part, attention, unscaled, next_norm)

    def _layer(
        self, hidden: torch.Tensor, batch: Batch, part: LayerWeights, attention: AttentionFacts, unscaled: Unscaled | None,
        next_norm: torch.Tensor | None,
    ) -> Unscaled | None:  # fmt: skip
        """`unscaled`: hidden, half normalised by the layer before; likewise the result, for the layer that has `next_norm`."""
        do, epsilon = self._do, self.facts.norm_epsilon
        incoming = do.products(
            part.query_key_value, hidden, norm=part.attention_norm, epsilon=epsilon, bias=part.query_key_value_bias,
            unscaled=unscaled,
        )  # fmt: skip
        attended = do.attend(incoming, batch, attention, part.attention_output)
        unscaled = self._add(
            hidden, attended, part.attention_output, part.attention_output_bias, part.post_attention_norm,
            part.feed_forward_norm,
        )  # fmt: skip
        activated = do.gated(
            part.gate_up, hidden, part.feed_forward_norm, epsilon, self.facts.activation, part.down, unscaled
        )
        return self._add(hidden, activated, part.down, None, part.post_feed_forward_norm, next_norm)

    def _add(
        self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, post_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
    ) -> Unscaled | None:  # fmt: skip
        do = self._do
        if post_norm is None:
            return do.add_product(matrix, x, hidden, bias, next_norm)
        product = do.products([matrix], x, norm=None, epsilon=0.0, bias=bias)
        do.add_normed(hidden, product, post_norm, self.facts.norm_epsilon)
        return None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, vocabulary) as float32."""
        weights, facts = self._weights, self.facts
        assert weights.output is not None
        assert weights.output_norm is not None
        logits = self._do.products(
            [weights.output], hidden, norm=weights.output_norm, epsilon=facts.norm_epsilon, bias=None, is_exact=True
        )
        return self._do.capped(logits, facts.output_soft_cap) if facts.output_soft_cap else logits

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return self._do.likeliest(logits)


def _tables(rotary: Rotary, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    table = RotaryTable(rotary)
    table.grow(positions)
    return torch.from_numpy(table.cos).to(device), torch.from_numpy(table.sin).to(device)
