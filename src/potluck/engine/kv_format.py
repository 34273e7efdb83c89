"""How keys and values are kept, on every device: pages of 64 positions, fp16 unless the model is float32. Pure; imports no kernels."""

from typing import Any

from potluck.core.model_facts import ModelFacts

PAGE_POSITIONS = 64
TILE = 32
LARGEST_HALF = 65504.0
MATRICES = ("query", "key", "value", "query_key_value", "attention_output", "gate", "up", "gate_up", "down")


def uses_half_kv(facts: ModelFacts, tensors: Any) -> bool:
    """Keys and values are fp16 unless every matrix of the model's layers is float32: the same answer on every shard."""
    matrices = (name for name in tensors if name.startswith("layers.") and name.rsplit(".", 1)[1] in MATRICES)
    return any(tensors[name].format != "F32" for name in matrices)
