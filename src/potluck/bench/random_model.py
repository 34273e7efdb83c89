"""Models of a real one's size with random weights: speed does not depend on what the weights are, only on how many.

The same shape and format give the same file on every machine. Files lie in the cache folder; made once, they stay.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.bench.gguf_writer import MetadataValue, PlannedTensor, file_bytes, write_gguf
from potluck.core.errors import BenchmarkFailed
from potluck.weights.checkpoint import BLOCKS

RandomFormat = Literal["Q4_0", "Q4_K", "F32"]
RECIPE_VERSION = 1  # counts changes to what is written for a shape and format
_SPREAD = 1.0  # standard deviation of a row's dot product with a normalised vector
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # llama.cpp's kinds of tokens


class RandomShape(msgspec.Struct, frozen=True, kw_only=True):
    """Qwen2.5-1.5B in everything but biases and vocabulary, written as a `llama` model with an output of its own."""

    name: str = "random-1.5b"
    hidden_size: int = 1536
    layer_count: int = 28
    head_count: int = 12
    kv_head_count: int = 2
    head_size: int = 128
    feed_forward_size: int = 8960
    vocabulary_size: int = 32_000
    context_length: int = 4096


def random_model(folder: Path, shape: RandomShape, format_name: RandomFormat, say: Callable[[str], None]) -> Path:
    """The model's file in `folder`, written now if it is not there. Raises BenchmarkFailed where the disk is too full."""
    path = folder / f"{recipe_name(shape, format_name)}.gguf"
    if path.exists():
        return path
    metadata, tensors = model_metadata(shape), planned_tensors(shape, format_name)
    folder.mkdir(parents=True, exist_ok=True)
    # Our packed form of it takes as much again.
    require_room(folder, 2 * file_bytes(metadata, tensors), path.name)
    say(f"writing {path.name} ({file_bytes(metadata, tensors) / 1e6:.0f} MB of random weights), once")
    numbers = np.random.default_rng([RECIPE_VERSION, len(tensors)])
    write_gguf(path, metadata, tensors, lambda tensor: random_content(tensor, numbers))
    return path


def recipe_name(shape: RandomShape, format_name: RandomFormat) -> str:
    """Names the content: the same name never stands for other bytes."""
    recipe = msgspec.json.encode((RECIPE_VERSION, shape, format_name))
    return f"{shape.name}-{format_name.lower()}-{hashlib.sha256(recipe).hexdigest()[:8]}"


def require_room(folder: Path, wanted_bytes: int, what: str) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < wanted_bytes:
        raise BenchmarkFailed(
            f"{what} and its packed form need {wanted_bytes / 1e9:.1f} GB in {folder}, where {free_bytes / 1e9:.1f} GB are free"
        )


def planned_tensors(shape: RandomShape, format_name: str) -> list[PlannedTensor]:
    hidden = shape.hidden_size
    outer = (shape.vocabulary_size, hidden)
    tensors = [PlannedTensor("token_embd.weight", format_name, outer)]
    for layer in range(shape.layer_count):
        tensors += _layer_tensors(shape, format_name, f"blk.{layer}.")
    tensors.append(PlannedTensor("output_norm.weight", "F32", (hidden,)))
    tensors.append(PlannedTensor("output.weight", format_name, outer))
    return tensors


def _layer_tensors(shape: RandomShape, format_name: str, prefix: str) -> list[PlannedTensor]:
    hidden, inner = shape.hidden_size, shape.feed_forward_size
    queries, keys = shape.head_count * shape.head_size, shape.kv_head_count * shape.head_size
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = [PlannedTensor(f"{prefix}{name}.weight", "F32", (hidden,)) for name in ("attn_norm", "ffn_norm")]
    return norms + [PlannedTensor(f"{prefix}{name}.weight", format_name, size) for name, size in matrices.items()]


def model_metadata(shape: RandomShape) -> dict[str, MetadataValue]:
    architecture: dict[str, MetadataValue] = {
        "block_count": shape.layer_count,
        "context_length": shape.context_length,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.feed_forward_size,
        "attention.head_count": shape.head_count,
        "attention.head_count_kv": shape.kv_head_count,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_size,
        "rope.freq_base": 1_000_000.0,
        "vocab_size": shape.vocabulary_size,
    }
    general: dict[str, MetadataValue] = {"general.architecture": "llama", "general.name": shape.name}
    return general | {f"llama.{key}": value for key, value in architecture.items()} | _tokenizer(shape.vocabulary_size)


def _tokenizer(size: int) -> dict[str, MetadataValue]:
    """The smallest SentencePiece vocabulary that llama.cpp takes: three special tokens, all bytes, made-up words."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"▁word{number}" for number in range(size - len(special) - len(pieces))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * len(pieces) + [_NORMAL] * len(words)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": special + pieces + words,
        "tokenizer.ggml.scores": [-float(number) for number in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def random_content(tensor: PlannedTensor, numbers: np.random.Generator) -> bytes:
    """Random quants; scales such that a normalised vector comes out about as large as it went in."""
    if tensor.format == "F32":
        return _floats(tensor.shape, numbers).tobytes()
    data = np.frombuffer(bytearray(numbers.bytes(tensor.size_bytes)), np.uint8)
    blocks = data.reshape(-1, BLOCKS[tensor.format][1])
    scale = _SPREAD / np.sqrt(tensor.shape[-1])
    if tensor.format == "Q4_0":
        _set_half(blocks, 0, scale / 4.6)  # the standard deviation of 0..15
    elif tensor.format == "Q4_K":
        # weight = d · scale · quant − dmin · min, with 6-bit scales and mins: 7.5 (the mean quant) centres it.
        _set_half(blocks, 0, scale / 257.0)
        _set_half(blocks, 2, 7.5 * scale / 257.0)
    else:
        raise ValueError(f"no random weights in {tensor.format}")
    return data.tobytes()


def _floats(shape: tuple[int, ...], numbers: np.random.Generator) -> npt.NDArray[np.float32]:
    """Norms are ones."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return numbers.standard_normal(shape, np.float32) * np.float32(_SPREAD / np.sqrt(shape[-1]))


def _set_half(blocks: npt.NDArray[np.uint8], offset: int, value: float) -> None:
    blocks[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
