"""What a range of layers takes on a GPU, from the tensors' formats and shapes alone: what a manifest knows. Imports no torch."""

import math
from collections.abc import Mapping
from typing import Protocol

from potluck.core.device_facts import RESERVE_BYTES
from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.weights.checkpoint import BLOCKS

_MEGABYTE = 1_000_000
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


def device_growth(tensors: Mapping[str, Described]) -> float:
    """How much more memory a model takes on a GPU than in its file, at the worst of its parts; never less than once."""
    parts: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        sizes = parts.setdefault(unit, [0, 0])
        elements, block_bytes = BLOCKS[tensor.format]
        sizes[0] += tensor_bytes(tensor)
        sizes[1] += math.prod(tensor.shape) // elements * block_bytes
    return max([1.0, *(there / max(1, here) for there, here in parts.values())])


def vram_required_mb(weight_bytes: int, kv_budget_bytes: int) -> int:
    """Megabytes that a GPU needs for a shard's weights, its pool of keys and values, and a reserve."""
    return math.ceil((weight_bytes + kv_budget_bytes + RESERVE_BYTES) / _MEGABYTE)
