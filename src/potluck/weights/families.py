"""What the families differ in that no file spells out. Knows neither GGUF nor Hugging Face; the readers ask it."""

import math
import struct
from pathlib import Path

import msgspec

from potluck.core.errors import UnknownArchitecture
from potluck.core.model_facts import Activation, RotaryForm
from potluck.weights.source_tensor import shown


class Family(msgspec.Struct, frozen=True):
    name: str
    activation: Activation = "silu"
    scales_embedding: bool = False  # by the square root of the hidden size
    has_query_key_norm: bool = False
    has_post_norms: bool = False
    sliding_period: int = 1  # all but the last layer of each period have a sliding window
    fuses_gate_up: bool = False
    rotary_form: RotaryForm = "halves"  # as Hugging Face has it
    rotary_share: float = 1.0  # of a head's dimensions, where the file does not say


FAMILIES = {
    family.name: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3", has_query_key_norm=True),
        Family("gemma", "gelu_tanh", scales_embedding=True),
        Family("gemma2", "gelu_tanh", scales_embedding=True, has_post_norms=True, sliding_period=2),
        Family("gemma3", "gelu_tanh", True, has_query_key_norm=True, has_post_norms=True, sliding_period=6),
        Family("phi3", fuses_gate_up=True),
        Family("glm", fuses_gate_up=True, rotary_form="interleaved", rotary_share=0.5),
        Family("glm4", has_post_norms=True, fuses_gate_up=True, rotary_form="interleaved", rotary_share=0.5),
    )
}


def family_called(name: str, aliases: dict[str, str], file: Path, field: str) -> Family:
    """The family of a file's own word for it; `aliases` maps all such words. Raises UnknownArchitecture."""
    if name not in aliases:
        raise UnknownArchitecture(file, field, f"{shown(name)} is not supported; known: {', '.join(sorted(aliases))}")
    return FAMILIES[aliases[name]]


def periodic_layers(period: int, layer_count: int) -> tuple[bool, ...]:
    """Which layers slide: all but the last of each period (layer 0 slides, unless the period is 1)."""
    return tuple(layer % period < period - 1 for layer in range(layer_count))


def long_magnitude(stretch: float, original_context: int) -> float:
    """What cosine and sine are multiplied by in a context stretched from `original_context` (LongRoPE)."""
    if stretch <= 1.0 or original_context <= 1:
        return 1.0
    return rounded(math.sqrt(1.0 + math.log(stretch) / math.log(original_context)))


def rounded(value: float) -> float:
    """To float32: libraries whose logarithms differ in the last bit must yield the same facts, hence the same hash."""
    (result,) = struct.unpack("<f", struct.pack("<f", value))
    return float(result)
