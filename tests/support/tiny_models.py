"""Tiny models on disk for tests of readers, manifests and fuzzers: a GGUF file, or a folder of safetensors."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from potluck.core.model_facts import ModelFacts, Rotary
from potluck.weights.expected_tensors import expected_tensors
from potluck.weights.hf_facts import facts_from_config
from potluck.weights.open_model import folder_name
from tests.support.gguf_files import Tensor, gguf_bytes, metadata_of, tensors_of

LLAMA_CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

LLAMA_FACTS = ModelFacts(
    architecture="llama",
    name="tiny",
    layer_count=2,
    hidden_size=32,
    feed_forward_size=64,
    head_count=4,
    kv_head_count=2,
    head_size=8,
    vocabulary_size=16,
    context_length=128,
    norm_epsilon=1e-5,
    rotary=Rotary("interleaved", 10000.0, 8),
    attention_scale=1.0 / math.sqrt(8),
    is_output_tied=True,
)


def tiny_gguf(
    format_name: str = "F32", metadata: Mapping[str | bytes, object] | None = None, **changes: Tensor
) -> bytes:
    """A whole tiny Llama; `changes` replace tensors, their names with `__` for dots."""
    tensors = tensors_of(LLAMA_FACTS, format_name) | {name.replace("__", "."): new for name, new in changes.items()}
    return gguf_bytes(metadata_of() if metadata is None else metadata, tensors)


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], header: bytes | None = None) -> bytes:
    """Name → dtype, shape, data. `header` replaces the JSON text."""
    entries, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(entries).encode() if header is None else header
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def folder_tensors(config: Mapping[str, object]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All tensors that a config calls for, as zeros in F32."""
    facts = facts_from_config(config, Path("config.json"))
    return {
        folder_name(name, facts, "model."): ("F32", shape, bytes(4 * math.prod(shape)))
        for name, shape in expected_tensors(facts).items()
    }


def write_folder(folder: Path, config: Mapping[str, object] = LLAMA_CONFIG, files: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(folder_tensors(config).items())
    if files == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(dict(tensors)))
        return folder
    index = {}
    for number in range(files):
        part, name = dict(tensors[number::files]), f"model-{number + 1:05}-of-{files:05}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(part))
        index.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
