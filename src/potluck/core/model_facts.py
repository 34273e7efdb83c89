"""What a decoder looks like, without its weights: one description for every family. Pure data; knows no file format."""

from typing import Literal

import msgspec

Activation = Literal["silu", "gelu_tanh"]
RotaryForm = Literal["interleaved", "halves"]  # pairs (2i, 2i+1), or (i, i + n/2)


class RotaryScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the rotary frequencies are stretched for a longer context.

    `linear` divides every frequency by `factor`. `llama3` leaves high frequencies, divides low ones and blends between.
    `yarn` blends by dimension and scales cos and sin by `magnitude`. `factors` divides frequency i by its own factor
    (long-context Phi-3; GGUF files that carry `rope_freqs`), and scales cos and sin by `magnitude`.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    factors: tuple[float, ...] = ()


class Rotary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    form: RotaryForm
    base: float
    dimensions: int  # how many of the head's dimensions are rotated, from the first on
    scaling: RotaryScaling | None = None


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One decoder. Booleans that describe tensors (biases, fusions) say what the file holds."""

    architecture: str  # family: llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3, glm, glm4
    name: str  # as the author calls it, for people
    layer_count: int
    hidden_size: int
    feed_forward_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    vocabulary_size: int
    context_length: int
    norm_epsilon: float
    norm_weight_plus_one: bool = (
        False  # Gemma from Hugging Face keeps norm weights minus one; GGUF has it added already
    )
    activation: Activation = "silu"
    rotary: Rotary
    rotary_local: Rotary | None = None  # for layers with a sliding window, where they differ (Gemma 3)
    attention_scale: float  # multiplies query · key
    attention_soft_cap: float | None = None
    output_soft_cap: float | None = None
    sliding_window: int | None = None  # how many positions such a layer sees, its own included
    sliding_layers: tuple[bool, ...] = ()  # per layer; empty: none
    has_attention_bias: bool = False  # on query, key and value
    has_attention_output_bias: bool = False
    has_feed_forward_bias: bool = False
    has_query_key_norm: bool = False  # RMS norm over each head of query and key, before the rotation
    has_post_norms: bool = False  # a norm after attention and after feed-forward, before each residual sum
    has_fused_query_key_value: bool = False
    has_fused_gate_up: bool = False
    embedding_scale: float | None = None
    is_output_tied: bool = False  # the output head uses the embedding's tensor

    def window_of(self, layer: int) -> int | None:
        """The sliding window of `layer`, or None where it sees everything before it."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None

    def rotary_of(self, layer: int) -> Rotary:
        return self.rotary_local if self.rotary_local is not None and self.window_of(layer) else self.rotary
