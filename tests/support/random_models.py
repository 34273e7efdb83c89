"""Facts of tiny decoders, one for each thing that families do differently; weights come from `random_checkpoint`."""

import math

from potluck.core.model_facts import ModelFacts, Rotary, RotaryScaling

PLAIN = Rotary("halves", 10_000.0, 16)


def facts_of(**changes: object) -> ModelFacts:
    """A small Llama with changes."""
    values: dict[str, object] = {
        "architecture": "llama", "name": "random", "layer_count": 3, "hidden_size": 64, "feed_forward_size": 96,
        "head_count": 4, "kv_head_count": 2, "head_size": 16, "vocabulary_size": 101, "context_length": 4096,
        "norm_epsilon": 1e-5, "rotary": PLAIN, "attention_scale": 0.25,
    }  # fmt: skip
    return ModelFacts(**values | changes)  # type: ignore[arg-type]


FAMILIES = {
    "llama": facts_of(rotary=Rotary("interleaved", 10_000.0, 16)),
    "llama 3": facts_of(rotary=Rotary("halves", 500_000.0, 16, RotaryScaling("llama3", 8.0, original_context=64))),
    "mistral": facts_of(architecture="mistral", sliding_window=40, sliding_layers=(True,) * 3),
    "qwen2": facts_of(architecture="qwen2", has_attention_bias=True, head_count=8, head_size=8, rotary=Rotary("halves", 1e6, 8)),
    "qwen3": facts_of(
        architecture="qwen3", has_query_key_norm=True, head_size=40, rotary=Rotary("halves", 1e6, 40), is_output_tied=True
    ),
    "gemma": facts_of(
        architecture="gemma", activation="gelu_tanh", norm_weight_plus_one=True, embedding_scale=8.0, is_output_tied=True,
        kv_head_count=1, head_size=32, rotary=Rotary("halves", 10_000.0, 32),
    ),
    "gemma2": facts_of(
        architecture="gemma2", activation="gelu_tanh", norm_weight_plus_one=True, embedding_scale=8.0, is_output_tied=True,
        has_post_norms=True, attention_soft_cap=5.0, output_soft_cap=3.0, sliding_window=33,
        sliding_layers=(True, False, True),
    ),
    "gemma3": facts_of(
        architecture="gemma3", activation="gelu_tanh", norm_weight_plus_one=True, embedding_scale=8.0, is_output_tied=True,
        has_post_norms=True, has_query_key_norm=True, sliding_window=17, sliding_layers=(True, True, False),
        rotary=Rotary("halves", 1e6, 16, RotaryScaling("linear", 8.0)), rotary_local=PLAIN,
    ),
    "phi3": facts_of(
        architecture="phi3", has_fused_query_key_value=True, has_fused_gate_up=True, head_size=24,
        rotary=Rotary("halves", 10_000.0, 12, RotaryScaling("yarn", 4.0, original_context=64, magnitude=1.1386)),
    ),
    "glm4": facts_of(
        architecture="glm4", has_attention_bias=True, has_fused_gate_up=True, has_post_norms=True, head_size=24,
        rotary=Rotary("interleaved", 10_000.0, 12),
    ),
    "biased output": facts_of(has_attention_bias=True, has_attention_output_bias=True, has_post_norms=True),
    "one key head for many": facts_of(head_count=12, kv_head_count=1, head_size=8, rotary=Rotary("halves", 10_000.0, 8)),
}  # fmt: skip

# Formats by role; "" stands for all others. Between them, every layout that is not a K format meets every role.
MIXES: dict[str, dict[str, str] | str] = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "Q4_1": {"": "Q4_1", "embedding": "Q8_0", "output": "Q8_0"},
    "mixed": {"": "Q4_0", "value": "Q5_1", "down": "Q5_0", "gate": "F16", "embedding": "Q4_1", "output": "BF16"},
}

# K formats need rows of 256.
WIDE = facts_of(
    layer_count=2, hidden_size=256, feed_forward_size=256, head_size=64, attention_scale=1 / math.sqrt(64),
    rotary=Rotary("interleaved", 10_000.0, 64),
)  # fmt: skip
WIDE_MIXES: dict[str, dict[str, str] | str] = {
    "Q4_K": {"": "Q4_K", "down": "Q6_K", "value": "Q6_K", "output": "Q6_K"},
    "Q5_K": {"": "Q5_K", "embedding": "Q6_K", "gate": "Q8_0"},
}
