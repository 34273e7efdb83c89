"""Writes small GGUF files, honest or lying: every number in the header can be set by hand."""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from potluck.core.model_facts import ModelFacts
from potluck.weights.checkpoint import BLOCKS
from potluck.weights.expected_tensors import expected_tensors
from potluck.weights.open_model import gguf_name

KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "array": 9}
KINDS |= {"u64": 10, "i64": 11, "f64": 12}
_CODES = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "B"}
_CODES |= {"u64": "Q", "i64": "q", "f64": "d"}
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}


class Typed(NamedTuple):
    """A value with its GGUF type spelled out; `element` for arrays. `raw` replaces the encoded value altogether."""

    kind: str
    value: object = None
    element: str | None = None
    raw: bytes | None = None


class Tensor(NamedTuple):
    """`shape` is outermost first, as numpy has it. What is None is worked out."""

    format: str
    shape: tuple[int, ...]
    data: bytes | None = None
    offset: int | None = None
    type_id: int | None = None


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _natural(value: object) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed("bool", value)
    if isinstance(value, int):
        return Typed("u32", value)
    if isinstance(value, float):
        return Typed("f32", value)
    if isinstance(value, str | bytes):
        return Typed("str", value)
    assert isinstance(value, Sequence)
    return Typed("array", value, _natural(value[0]).kind if value else "u32")


def _payload(kind: str, value: object, element: str | None = None) -> bytes:
    if kind == "str":
        return string(value)  # type: ignore[arg-type]
    if kind == "array":
        assert element is not None
        assert isinstance(value, Sequence)
        parts = [_payload(*_nested(element, item)) for item in value]
        return struct.pack("<IQ", KINDS[element], len(value)) + b"".join(parts)
    return struct.pack("<" + _CODES[kind], value)


def _nested(element: str, item: object) -> tuple[str, object, str | None]:
    return (element, item, _natural(item).element) if element == "array" else (element, item, None)


def metadata_bytes(metadata: Mapping[str | bytes, object]) -> bytes:
    parts = []
    for key, value in metadata.items():
        typed = _natural(value)
        payload = _payload(typed.kind, typed.value, typed.element) if typed.raw is None else typed.raw
        parts.append(string(key) + struct.pack("<I", KINDS.get(typed.kind, 99)) + payload)
    return b"".join(parts)


def tensor_size(tensor: Tensor) -> int:
    elements, size_bytes = BLOCKS[tensor.format]
    return math.prod(tensor.shape) // elements * size_bytes


def gguf_bytes(
    metadata: Mapping[str | bytes, object],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    infos, data = b"", bytearray()
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        kind = TYPE_IDS[tensor.format] if tensor.type_id is None else tensor.type_id
        dimensions = tuple(reversed(tensor.shape))
        infos += string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
        data += bytes(tensor_size(tensor)) if tensor.data is None else tensor.data
    counts = struct.pack(
        "<QQ",
        len(tensors) if tensor_count is None else tensor_count,
        len(metadata) if key_count is None else key_count,
    )
    header = magic + struct.pack("<I", version) + counts + metadata_bytes(metadata) + infos
    return header + bytes(-len(header) % alignment) + bytes(data)


def metadata_of(architecture: str = "llama", **changes: object) -> dict[str | bytes, object]:
    """A tiny model's metadata; `changes` are keys below the architecture with `__` for dots, None takes one out."""
    values: dict[str, object] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": architecture, "general.name": "tiny", **named}


def tensors_of(facts: ModelFacts, format_name: str = "F32") -> dict[str, Tensor]:
    """All tensors that facts call for, matrices in `format_name`, filled with a counting pattern."""
    tensors = {}
    for name, shape in expected_tensors(facts).items():
        tensor = Tensor(format_name if len(shape) == 2 else "F32", shape)
        size = tensor_size(tensor)
        pattern = bytes((index * 7 + len(tensors)) % 251 for index in range(min(size, 1024)))
        tensors[gguf_name(name)] = tensor._replace(data=(pattern * (size // max(1, len(pattern)) + 1))[:size])
    return tensors
