"""What a range of layers takes on a GPU, from the tensors' formats and shapes alone: what a manifest knows. Imports no torch."""

import math
from collections.abc import Mapping
from typing import Protocol

from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.weights.checkpoint import BLOCKS

PAGE_POSITIONS = 64
_MEBIBYTE = 1 << 20
# Bytes of 32 columns on the device: words or bytes of quants, and their scales. Losslessly, some formats grow.
_BLOCK_BYTES = {
    "Q4_0": 18.0, "Q4_1": 20.0, "Q5_0": 34.0, "Q5_1": 36.0, "Q8_0": 34.0, "Q4_K": 18.5, "Q5_K": 34.5, "Q6_K": 34.25,
}  # fmt: skip


class Described(Protocol):
    """A tensor of a checkpoint or a manifest."""

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def tensor_bytes(tensor: Described) -> int:
    elements = math.prod(tensor.shape)
    if len(tensor.shape) == 1:
        return 4 * elements  # norms and biases are float32 there
    if tensor.format in _BLOCK_BYTES:
        return int(elements / 32 * _BLOCK_BYTES[tensor.format])
    return elements * BLOCKS[tensor.format][1]


def device_bytes(
    tensors: Mapping[str, Described],
    facts: ModelFacts,
    layers: LayerRange | None,
    has_embedding: bool,
    has_output: bool,
) -> int:
    """Weights of a shard on the device."""
    wanted = range(layers.start, layers.stop) if layers is not None else range(0)
    names = [name for name in tensors if name.startswith("layers.") and int(name.split(".")[1]) in wanted]
    names += ["embedding"] if has_embedding or (has_output and facts.is_output_tied) else []
    names += [name for name in ("output", "output_norm") if has_output and name in tensors]
    return sum(tensor_bytes(tensors[name]) for name in names)


def kv_bytes(facts: ModelFacts, layers: int, positions: int, element_bytes: int = 2) -> int:
    pages = -(-positions // PAGE_POSITIONS)
    return pages * PAGE_POSITIONS * layers * 2 * facts.kv_head_count * facts.head_size * element_bytes


def vram_required_mb(
    tensors: Mapping[str, Described], facts: ModelFacts, layers: LayerRange, *, positions: int = 4096, reserve_bytes: int = 1 << 30
) -> int:  # fmt: skip
    """Mebibytes that a GPU needs for a range with its ends, keys and values of `positions` positions, and a reserve."""
    is_first, is_last = layers.start == 0, layers.stop == facts.layer_count
    weights = device_bytes(tensors, facts, layers, is_first, is_last)
    return math.ceil((weights + kv_bytes(facts, len(layers), positions) + reserve_bytes) / _MEBIBYTE)
