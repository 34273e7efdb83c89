"""One tiny model of each family that has rules of its own, as a config.json and as GGUF metadata with tensors."""

import struct
from collections.abc import Mapping
from pathlib import Path

from potluck.weights.hf_facts import facts_from_config
from tests.support.gguf_files import Tensor, metadata_of, tensors_of
from tests.support.tiny_models import LLAMA_CONFIG

_WITHOUT_ROPE = {key: value for key, value in LLAMA_CONFIG.items() if key not in ("rope_theta", "hidden_act")}
_GEMMA = {"head_dim": 8, "sliding_window": 32, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
_LONG_FACTORS = [1.0, 2.0, 3.0, 4.0]

FAMILY_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "gemma2": _WITHOUT_ROPE | _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
    "gemma3": _WITHOUT_ROPE | _GEMMA | {
        "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
    "phi3": LLAMA_CONFIG | {
        "model_type": "phi3", "original_max_position_embeddings": 64, "sliding_window": 100,
        "rope_scaling": {"type": "longrope", "long_factor": _LONG_FACTORS, "short_factor": [1.0, 1.0, 1.5, 2.0]},
    },
    "qwen3": LLAMA_CONFIG | {
        "model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1,
    },
    "yarn": LLAMA_CONFIG | {
        "model_type": "qwen2",
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    },
}  # fmt: skip

_ARCHITECTURES = {"yarn": "qwen2"}
_GGUF_CHANGES: Mapping[str, Mapping[str, object]] = {
    "gemma2": {"attention__sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"attention__sliding_window": 32, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
    "phi3": {"rope__scaling__original_context_length": 64, "rope__dimension_count": 8, "rope__scaling__attn_factor": 1.2},
    "qwen3": {"attention__key_length": 16, "attention__value_length": 16},
    "yarn": {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32,
        "rope__scaling__yarn_beta_fast": 32.0, "rope__scaling__yarn_beta_slow": 1.0,
    },
}  # fmt: skip


def family_metadata(family: str, **changes: object) -> dict[str | bytes, object]:
    return metadata_of(_ARCHITECTURES.get(family, family), **{**_GGUF_CHANGES[family], **changes})


def family_tensors(family: str) -> dict[str, Tensor]:
    tensors = tensors_of(facts_from_config(FAMILY_CONFIGS[family], Path("config.json")))
    if family == "phi3":
        tensors["rope_factors_long.weight"] = Tensor("F32", (4,), struct.pack("<4f", *_LONG_FACTORS))
        tensors["rope_factors_short.weight"] = Tensor("F32", (4,), struct.pack("<4f", 1, 1, 1.5, 2))
    return tensors
