"""A stored model without a file, for tests that ask what its weights take."""

from pathlib import Path

import msgspec

from potluck.core.model_facts import ModelFacts, Rotary
from potluck.node.serving import StoredModel
from potluck.weights.checkpoint import TensorEntry

MEGABYTE = 1_000_000
FACTS = ModelFacts(
    architecture="llama", name="m", layer_count=4, hidden_size=8, feed_forward_size=16, head_count=1, kv_head_count=1,
    head_size=8, vocabulary_size=16, context_length=64, norm_epsilon=1e-5, rotary=Rotary("halves", 1e4, 8),
    attention_scale=0.35,
)  # fmt: skip


def stored_model(*, is_tied: bool = False) -> StoredModel:
    """Four layers of 10 MB, an embedding and an output of 5 MB each, or one for both."""
    sizes = {f"layers.{layer}.query": 10 for layer in range(4)} | {"embedding": 5}
    sizes |= {"output_norm": 0} if is_tied else {"output": 5}
    tensors = {name: TensorEntry(name, name, "F32", (1,), Path(), 0, size * MEGABYTE) for name, size in sizes.items()}
    facts = msgspec.structs.replace(FACTS, is_output_tied=is_tied)
    return StoredModel("m", Path(), None, "a" * 64, facts, b"", b"", tensors)
