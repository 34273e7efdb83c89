"""A Llama in a GGUF file as transformers' float32 model, its weights dequantised by the `gguf` package: no line of ours in it."""

from pathlib import Path

import gguf
import numpy as np
import torch

from tests.support.family_configs import transformers as hf

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROLES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_dequantised(path: Path) -> hf.LlamaForCausalLM:
    reader = gguf.GGUFReader(path)
    config = _config(reader)
    with hf.initialization.no_init_weights():
        model = hf.LlamaForCausalLM(config).eval()
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights[_name(tensor.name)] = torch.from_numpy(_halves(tensor.name, values, config))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def _config(reader: gguf.GGUFReader) -> hf.LlamaConfig:
    def field(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    names = {tensor.name: tensor for tensor in reader.tensors}
    return hf.LlamaConfig(
        vocab_size=int(names["token_embd.weight"].shape[1]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
    )


def _name(name: str) -> str:
    if not name.startswith("blk."):
        return _NAMES[name.removesuffix(".weight")] + ".weight"
    _, layer, role, _ = name.split(".")
    return f"model.layers.{layer}.{_ROLES[role]}.weight"


def _halves(name: str, values: np.ndarray, config: hf.LlamaConfig) -> np.ndarray:
    """Queries and keys back from neighbouring pairs to halves, which is how transformers rotates."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
