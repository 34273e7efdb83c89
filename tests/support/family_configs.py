"""A tiny configuration of every family and variant, for transformers; who needs weights makes them on the spot."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers reads it

import transformers

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.0, 1.5, 2.0]}

CASES = {
    "llama 2": ("Llama", {}),
    "llama 3.1": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}),
    "llama with biases": ("Llama", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": 32}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2 windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 32}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 7}),
    "gemma3 stretched": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 32,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("Phi3", {"sliding_window": 100}),
    "phi3 long": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **LONG},
        },
    ),
    "phi3 partly rotated": (
        "Phi3",
        {"hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
}  # fmt: skip


def config_of(case: str) -> transformers.PretrainedConfig:
    family, changes = CASES[case]
    return getattr(transformers, f"{family}Config")(**TINY | changes)


def model_class_of(case: str) -> type[transformers.PreTrainedModel]:
    return getattr(transformers, f"{CASES[case][0].removesuffix('Text')}ForCausalLM")
