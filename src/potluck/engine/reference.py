"""The arithmetic of docs/arithmetic.md in plain numpy: slow, short, and the judge of the kernels, which must equal it bit for bit.

Every operation below is one float32 rounding; numpy never fuses or reorders elementwise operations.
"""

from typing import Any

import numpy as np

from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts, Rotary
from potluck.engine import formats
from potluck.engine.kernels.attention import LOWEST_SCORE, SPAN_POSITIONS
from potluck.engine.kernels.functions import HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, ROUNDER, TERMS
from potluck.engine.kv_format import LARGEST_HALF, PAGE_POSITIONS, uses_half_kv
from potluck.engine.rotary import RotaryTable
from potluck.engine.shard_weights import Embedding
from potluck.weights.checkpoint import Checkpoint

Floats = Any  # float32 arrays; numpy's stubs widen them at every operation
F = np.float32


# ---------------------------------------------------------------- functions


def exp(x: Floats) -> Floats:
    x = np.where(x < LOWEST, LOWEST, x)
    x = np.where(x > HIGHEST, HIGHEST, x)
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.full_like(r, TERMS[0])
    for term in TERMS[1:]:
        p = p * r + term
    exponent = ((shifted.view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * exponent


def silu(x: Floats) -> Floats:
    return x / (F(1) + exp(-x))


def gelu_tanh(x: Floats) -> Floats:
    inner = F(2 * 0.7978845608028654) * (x + F(0.044715) * ((x * x) * x))
    return x / (F(1) + exp(-inner))


def tanh(x: Floats) -> Floats:
    return F(1) - F(2) / (exp(F(2) * x) + F(1))


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Squares in eight lanes, column after column; lanes in a tree; what is left over one by one."""
    count = x.shape[-1]
    whole = count // 8 * 8
    lanes = np.zeros((*x.shape[:-1], 8), np.float32)
    for i in range(0, whole, 8):
        lanes = lanes + x[..., i : i + 8] * x[..., i : i + 8]
    s = [lanes[..., i] for i in range(8)]
    total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
    for i in range(whole, count):
        total = total + x[..., i] * x[..., i]
    r = F(1) / np.sqrt(total / F(count) + F(epsilon))
    return (x * r[..., None]) * weight


def quantise(x: Floats) -> tuple[Any, Floats, Floats]:
    """Rows to int8 by blocks of 32: integers (rows, blocks, 32), scale d, and d · sum."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1)
    is_usable = (largest > F(1e-30)) & (largest < F(3e38))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(is_usable, F(127) / largest, F(0))
        integers = np.rint(blocks * inverse[..., None])
        d = np.where(is_usable, largest / F(127), np.where(largest <= F(1e-30), F(0), F(np.nan)))
    integers = np.where(is_usable[..., None], integers, F(0)).astype(np.int32)
    return integers, d, d * integers.sum(axis=-1).astype(np.float32)


# ---------------------------------------------------------------- products


def matmul(data: Any, format_name: str, rows: int, x: Floats) -> Floats:
    """x (tokens, columns) times the transposed matrix, as (tokens, rows)."""
    if format_name in formats.READERS:
        return _matmul_quantised(formats.READERS[format_name](formats.as_blocks(data, format_name, rows)), x)
    weights = formats.to_float32(data, format_name).reshape(rows, -1)
    padding = -weights.shape[1] % 32
    weights = np.pad(weights, ((0, 0), (0, padding)))
    x = np.pad(x, ((0, 0), (0, padding)))
    total = np.zeros((len(x), rows), np.float32)
    for first in range(0, weights.shape[1], 32):
        part = np.zeros_like(total)
        for column in range(first, first + 32):
            part = part + weights[None, :, column] * x[:, None, column]
        total = total + part
    return total


def _matmul_quantised(weights: formats.Quantised, x: Floats) -> Floats:
    integers, d, s = quantise(x)
    total = np.zeros((len(x), len(weights.integers)), np.float32)
    for block in range(integers.shape[1]):
        w, a = weights.integers[:, block].astype(np.int32), integers[:, block]
        if weights.sixteens is not None:
            scales = weights.sixteens[:, block]
            exact = (a[:, :16] @ w[:, :16].T) * scales[None, :, 0] + (a[:, 16:] @ w[:, 16:].T) * scales[None, :, 1]
        else:
            exact = a @ w.T
        scaled = (weights.scale[None, :, block] * d[:, None, block]) * exact.astype(np.float32)
        if weights.minimum is not None:
            scaled = scaled + weights.minimum[None, :, block] * s[:, None, block]
        total = total + scaled
    return total


# ---------------------------------------------------------------- attention


def rotate(x: Floats, rotary: Rotary, cos: Floats, sin: Floats) -> Floats:
    """x: (tokens, heads, size); cos, sin: (tokens, pairs)."""
    half = rotary.dimensions // 2
    pairs = np.arange(half)
    first, second = (2 * pairs, 2 * pairs + 1) if rotary.form == "interleaved" else (pairs, pairs + half)
    left, right = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = left * cos[:, None] - right * sin[:, None]
    turned[..., second] = left * sin[:, None] + right * cos[:, None]
    return turned


def _span(
    query: Floats, keys: Floats, values: Floats, low: int, high: int, cap: float | None
) -> tuple[Any, Any, Floats]:
    """One query over positions low … high - 1 of one span: running maximum over blocks of 64 positions."""
    maximum, lanes, sums = LOWEST_SCORE, np.zeros(16, np.float32), np.zeros(values.shape[1], np.float32)
    for start in range(low // PAGE_POSITIONS * PAGE_POSITIONS, high, PAGE_POSITIONS):
        positions = range(max(low, start), min(high, start + PAGE_POSITIONS))
        scores = np.zeros(len(positions), np.float32)
        for i in range(len(query)):
            scores = scores + query[i] * keys[positions.start : positions.stop, i]
        if cap is not None:
            scores = F(cap) * tanh(scores / F(cap))
        new = max(maximum, scores.max())
        rescale = exp(np.array([maximum - new], np.float32))[0]
        weights = exp(scores - new)
        lanes, sums, maximum = lanes * rescale, sums * rescale, new
        for position, weight in zip(positions, weights, strict=True):
            lanes[position % 16] = lanes[position % 16] + weight
            sums = sums + weight * values[position]
    s = [(lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]) for i in range(4)]
    return maximum, (s[0] + s[2]) + (s[1] + s[3]), sums


def attend(query: Floats, keys: Floats, values: Floats, position: int, window: int | None, cap: float | None) -> Floats:
    """One head at one position; keys and values are float32 (positions, size)."""
    first = 0 if window is None else max(0, position + 1 - window)
    state: tuple[Any, Any, Floats] | None = None
    for start in range(first // SPAN_POSITIONS * SPAN_POSITIONS, position + 1, SPAN_POSITIONS):
        later = _span(query, keys, values, max(first, start), min(position + 1, start + SPAN_POSITIONS), cap)
        state = later if state is None else _merge(state, later)
    assert state is not None
    return state[2] / state[1]


def _merge(left: tuple[Any, Any, Floats], right: tuple[Any, Any, Floats]) -> tuple[Any, Any, Floats]:
    top = max(left[0], right[0])
    before, after = exp(np.array([left[0] - top, right[0] - top], np.float32))
    return top, left[1] * before + right[1] * after, left[2] * before + right[2] * after


# ---------------------------------------------------------------- the decoder


class ReferenceDecoder:
    """Layers of a model over one session, one token range at a time. Holds keys and values as they are stored."""

    def __init__(self, checkpoint: Checkpoint, layers: LayerRange) -> None:
        self.checkpoint, self.layers, self.facts = checkpoint, layers, checkpoint.facts
        is_half = uses_half_kv(self.facts, checkpoint.tensors)
        self.kv_type = np.float16 if is_half else np.float32
        shape = (0, self.facts.kv_head_count, self.facts.head_size)
        self.keys: dict[int, Any] = {layer: np.zeros(shape, self.kv_type) for layer in layers}
        self.values: dict[int, Any] = {layer: np.zeros(shape, self.kv_type) for layer in layers}
        self._tables: dict[Rotary, RotaryTable] = {}

    def embed(self, tokens: list[int]) -> Floats:
        return Embedding(self.checkpoint).look_up(tokens)

    def forward(self, hidden: Floats) -> Floats:
        for layer in self.layers:
            hidden = self._layer(layer, hidden)
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        name = "embedding" if self.facts.is_output_tied else "output"
        normed = rms_norm(hidden, self._vector("output_norm"), self.facts.norm_epsilon)
        logits = self._matmul(name, normed)
        cap = self.facts.output_soft_cap
        return logits if cap is None else F(cap) * tanh(logits / F(cap))

    def _vector(self, name: str) -> Floats:
        entry = self.checkpoint.tensors[name]
        values = formats.to_float32(self.checkpoint.read(name), entry.format)
        return values + F(1) if name.endswith("norm") and self.facts.norm_weight_plus_one else values

    def _matmul(self, name: str, x: Floats) -> Floats:
        entry = self.checkpoint.tensors[name]
        return matmul(self.checkpoint.read(name), entry.format, entry.shape[0], x)

    def _layer(self, layer: int, hidden: Floats) -> Floats:
        facts, at = self.facts, f"layers.{layer}."
        normed = rms_norm(hidden, self._vector(at + "attention_norm"), facts.norm_epsilon)
        projected = self._matmul(at + "attention_output", self._attention(layer, normed))
        if facts.has_attention_output_bias:
            projected = projected + self._vector(at + "attention_output_bias")
        hidden = hidden + self._post_norm(at + "post_attention_norm", projected)
        normed = rms_norm(hidden, self._vector(at + "feed_forward_norm"), facts.norm_epsilon)
        if facts.has_fused_gate_up:
            gate, up = np.split(self._matmul(at + "gate_up", normed), 2, axis=1)
        else:
            gate, up = self._matmul(at + "gate", normed), self._matmul(at + "up", normed)
        activated = (silu(gate) if facts.activation == "silu" else gelu_tanh(gate)) * up
        return hidden + self._post_norm(at + "post_feed_forward_norm", self._matmul(at + "down", activated))

    def _post_norm(self, name: str, x: Floats) -> Floats:
        return rms_norm(x, self._vector(name), self.facts.norm_epsilon) if self.facts.has_post_norms else x

    def _query_key_value(self, layer: int, normed: Floats) -> list[Floats]:
        facts, at = self.facts, f"layers.{layer}."
        if facts.has_fused_query_key_value:
            heads, kv = facts.head_count * facts.head_size, facts.kv_head_count * facts.head_size
            parts = np.split(self._matmul(at + "query_key_value", normed), [heads, heads + kv], axis=1)
        else:
            parts = [self._matmul(at + role, normed) for role in ("query", "key", "value")]
        if facts.has_attention_bias:
            parts = [
                part + self._vector(f"{at}{role}_bias")
                for part, role in zip(parts, ("query", "key", "value"), strict=True)
            ]
        return [part.reshape(len(normed), -1, facts.head_size) for part in parts]

    def _attention(self, layer: int, normed: Floats) -> Floats:
        facts, at = self.facts, f"layers.{layer}."
        query, key, value = self._query_key_value(layer, normed)
        if facts.has_query_key_norm:
            query = rms_norm(query, self._vector(at + "query_norm"), facts.norm_epsilon)
            key = rms_norm(key, self._vector(at + "key_norm"), facts.norm_epsilon)
        start = len(self.keys[layer])
        cos, sin = self._angles(facts.rotary_of(layer), start, start + len(normed))
        query = rotate(query, facts.rotary_of(layer), cos, sin) * F(facts.attention_scale)
        key = rotate(key, facts.rotary_of(layer), cos, sin)
        self.keys[layer] = np.concatenate([self.keys[layer], self._stored(key)])
        self.values[layer] = np.concatenate([self.values[layer], self._stored(value)])
        return self._heads(layer, query, start)

    def _heads(self, layer: int, query: Floats, start: int) -> Floats:
        facts: ModelFacts = self.facts
        keys, values = self.keys[layer].astype(np.float32), self.values[layer].astype(np.float32)
        group = facts.head_count // facts.kv_head_count
        output = np.empty_like(query)
        for row in range(len(query)):
            for head in range(facts.head_count):
                output[row, head] = attend(
                    query[row, head], keys[:, head // group], values[:, head // group], start + row,
                    facts.window_of(layer), facts.attention_soft_cap,
                )  # fmt: skip
        return output.reshape(len(query), -1)

    def _angles(self, rotary: Rotary, start: int, stop: int) -> tuple[Floats, Floats]:
        table = self._tables.setdefault(rotary, RotaryTable(rotary))
        table.grow(stop)
        return table.cos[start:stop], table.sin[start:stop]

    def _stored(self, x: Floats) -> Any:
        if self.kv_type is np.float16:
            x = np.clip(x, F(-LARGEST_HALF), F(LARGEST_HALF))
        return x.astype(self.kv_type)
