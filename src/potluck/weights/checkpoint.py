"""A model on disk, whatever its format: facts, tokenizer and named tensors. The readers fill it; nobody else parses files.

Tensors have canonical names: `embedding`, `output_norm`, `output` (absent when tied), and `layers.N.ROLE` with the roles below.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from potluck.core.model_facts import ModelFacts
from potluck.core.tokenizer_spec import TokenizerSpec

TensorFormat = Literal["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

# Elements and bytes of one block of a row, by format.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

LAYER_ROLES = (
    "attention_norm",
    "query",
    "key",
    "value",
    "query_key_value",  # fused, in that order
    "query_bias",
    "key_bias",
    "value_bias",
    "attention_output",
    "attention_output_bias",
    "query_norm",
    "key_norm",
    "post_attention_norm",
    "feed_forward_norm",
    "gate",
    "up",
    "gate_up",  # fused, gate first
    "down",
    "post_feed_forward_norm",
)


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies. `shape` is (rows, columns) or (length,), rows being outputs; a row is contiguous."""

    name: str  # canonical
    source_name: str  # as the file calls it
    format: TensorFormat
    shape: tuple[int, ...]
    file: Path
    offset: int  # absolute, in the file
    size_bytes: int


class Checkpoint(Protocol):
    """An opened, validated model. Every tensor that `facts` call for exists with the right shape and lies inside its file.

    Of a partial model (`partial_model.py`) some files may not be there: reading their tensors raises WeightsMissing.
    """

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def tokenizer(self) -> TokenizerSpec | None: ...

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...

    def read(self, name: str) -> memoryview:
        """The tensor's bytes, memory-mapped and read-only; nothing is copied. Raises KeyError for an unknown name."""
        ...

    def forget(self, name: str) -> None:
        """The tensor's bytes have been used up: they need not stay in memory. They can be read again."""
        ...

    def forget_all(self) -> None:
        """The same for everything. The system also maps what lies around the bytes that are read, megabytes at times."""
        ...

    def close(self) -> None: ...
