"""A transformers model as a GGUF file in F32, written with the `gguf` package the way llama.cpp's converter does it."""

import math
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tests.support.family_configs import transformers as hf

Floats = npt.NDArray[np.float32]

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "gemma3_text": "gemma3"}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROLES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_POST_NORM_ROLES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_GLM4_ROLES = {
    "post_self_attn_layernorm.weight": "post_attention_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
}


def write_gguf(model: hf.PreTrainedModel, path: Path) -> Path:
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    _add_attention(writer, config)
    for name, values in _tensors(model, architecture).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: hf.PretrainedConfig) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = _head_size(config)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)


def _head_size(config: hf.PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config: hf.PretrainedConfig) -> dict[str, object]:
    parameters = config.rope_parameters
    return parameters.get("full_attention", parameters)


def _add_attention(writer: gguf.GGUFWriter, config: hf.PretrainedConfig) -> None:
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(_head_size(config) * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _tensors(model: hf.PreTrainedModel, architecture: str) -> dict[str, Floats]:
    config, tensors = model.config, {}
    roles = _ROLES | _POST_NORM_ROLES if architecture in ("gemma2", "gemma3") else _ROLES | _GLM4_ROLES
    for name, value in model.state_dict().items():
        values = value.to(torch.float32).numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if architecture == "llama" and ".q_proj." in name:
            values = _neighbours(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _neighbours(values, config.num_key_value_heads)
        tensors[_gguf_name(name, roles)] = np.ascontiguousarray(values)
    if _rope(config).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(config)
    return tensors


def _gguf_name(name: str, roles: dict[str, str]) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, role = name.split(".", 3)
    return f"blk.{layer}.{roles[role]}"


def _neighbours(values: Floats, heads: int) -> Floats:
    """Rows i and i + n/2 of each head become neighbours, as llama.cpp's rotation wants them for Llama."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(config: hf.PretrainedConfig) -> Floats:
    rope, size = _rope(config), _head_size(config)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for pair in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (pair / size)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
