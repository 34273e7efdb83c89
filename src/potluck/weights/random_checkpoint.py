"""A model that is nothing but its shapes: random weights of real sizes, from a name and a seed. For benchmarks; there is no file.

`random:qwen2.5-7b:BF16:1` names one. Engines that can make weights where they are needed ask for nothing else.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from potluck.core.errors import BadRequest, ModelNotFound
from potluck.core.model_facts import ModelFacts, Rotary, RotaryScaling
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.weights.checkpoint import BLOCKS, TensorEntry, TensorFormat
from potluck.weights.expected_tensors import expected_tensors

PREFIX = "random:"
RANDOM_FORMATS: tuple[TensorFormat, ...] = ("BF16", "F16", "Q4_0", "Q8_0", "Q4_K")


def _qwen2(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, is_tied: bool
) -> ModelFacts:
    return ModelFacts(
        architecture="qwen2", name=name, layer_count=layers, hidden_size=hidden, feed_forward_size=inner, head_count=heads,
        kv_head_count=kv_heads, head_size=128, vocabulary_size=vocabulary, context_length=32768, norm_epsilon=1e-6,
        rotary=Rotary("halves", 1e6, 128), attention_scale=1 / math.sqrt(128), has_attention_bias=True, is_output_tied=is_tied,
    )  # fmt: skip


RANDOM_MODELS = {
    "qwen2.5-7b": _qwen2("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, False),
    "qwen2.5-3b": _qwen2("qwen2.5-3b", 36, 2048, 11008, 16, 2, 151936, True),
    "llama-3.2-3b": ModelFacts(
        architecture="llama", name="llama-3.2-3b", layer_count=28, hidden_size=3072, feed_forward_size=8192, head_count=24,
        kv_head_count=8, head_size=128, vocabulary_size=128256, context_length=32768, norm_epsilon=1e-5,
        rotary=Rotary("halves", 5e5, 128, RotaryScaling("llama3", 32.0, 1.0, 4.0, 8192)), attention_scale=1 / math.sqrt(128),
        is_output_tied=True,
    ),
    "tiny": ModelFacts(
        architecture="llama", name="tiny", layer_count=4, hidden_size=256, feed_forward_size=512, head_count=4, kv_head_count=2,
        head_size=64, vocabulary_size=512, context_length=8192, norm_epsilon=1e-5, rotary=Rotary("halves", 1e4, 64),
        attention_scale=0.125,
    ),
}  # fmt: skip


class RandomCheckpoint:
    """Facts and tensor entries; `read` is refused, because nobody should move such weights through a host."""

    def __init__(self, facts: ModelFacts, format_name: TensorFormat, seed: int) -> None:
        self.facts, self.format, self.seed = facts, format_name, seed
        self.tensors: Mapping[str, TensorEntry] = {
            name: _entry(name, format_name if len(shape) == 2 else "F32", shape)
            for name, shape in expected_tensors(facts).items()
        }

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        return None

    def read(self, name: str) -> memoryview:
        raise BadRequest(
            f"{name} of a random model is made on the device that computes with it; a CPU has no use for it"
        )

    def forget(self, name: str) -> None:
        """There is nothing to forget."""

    def forget_all(self) -> None:
        """Nor here."""

    def close(self) -> None:
        pass


def _entry(name: str, format_name: TensorFormat, shape: tuple[int, ...]) -> TensorEntry:
    elements, size_bytes = BLOCKS[format_name]
    return TensorEntry(name, name, format_name, shape, Path("random"), 0, math.prod(shape) // elements * size_bytes)


def is_random(model_path: str) -> bool:
    return model_path.startswith(PREFIX)


def random_name(shape: str, format_name: str, seed: int = 1) -> str:
    return f"{PREFIX}{shape}:{format_name}:{seed}"


def open_random(model_path: str) -> RandomCheckpoint:
    """Raises ModelNotFound for a shape or format that we do not have."""
    shape, _, rest = model_path.removeprefix(PREFIX).partition(":")
    format_name, _, seed = rest.partition(":")
    if shape not in RANDOM_MODELS or format_name not in RANDOM_FORMATS or not seed.isdecimal():
        known = f"{', '.join(RANDOM_MODELS)}; {', '.join(RANDOM_FORMATS)}"
        raise ModelNotFound(f"there is no random model {model_path}; known shapes and formats: {known}")
    return RandomCheckpoint(RANDOM_MODELS[shape], next(f for f in RANDOM_FORMATS if f == format_name), int(seed))
