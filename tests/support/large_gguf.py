"""A random model of some hundred megabytes as GGUF, for tests of memory; its text would be rubbish."""

from pathlib import Path

import gguf
import numpy as np

from tests.support.random_weights import random_weights

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 16, 4, 4096


def write_large_gguf(path: Path, layers: int = 8, format_name: str = "Q4_0") -> Path:
    """About 27 MB a layer. All layers hold the same numbers, which costs nothing here and saves time."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("large")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    kind = gguf.GGMLQuantizationType[format_name]
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN), "ffn_down": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    matrices = {role: random_weights(rng, format_name, *shape, 0.05) for role, shape in shapes.items()}
    ones = np.ones(HIDDEN, np.float32)
    writer.add_tensor(
        "token_embd.weight", random_weights(rng, "Q8_0", VOCABULARY, HIDDEN), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    for layer in range(layers):
        for role, data in matrices.items():
            writer.add_tensor(f"blk.{layer}.{role}.weight", data, raw_dtype=kind)
        for role in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{role}.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
