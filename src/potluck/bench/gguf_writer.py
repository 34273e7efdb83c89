"""Writes GGUF files (version 3) tensor by tensor, so that a model never lies in memory as a whole.

Knows the container only; what keys mean and what tensors hold is the caller's business.
"""

import math
import os
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from potluck.weights.checkpoint import BLOCKS
from potluck.weights.gguf import DEFAULT_ALIGNMENT

MetadataValue = bool | int | float | str | list[str] | list[int] | list[float]

# The container's numbers for types of values, by the Python type that we write them from.
_KINDS: dict[type, tuple[int, str]] = {bool: (7, "B"), int: (4, "I"), float: (6, "f")}
_SIGNED = (5, "i")  # llama.cpp insists on signed token types
_STRING, _ARRAY = 8, 9
_TENSOR_KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}


class PlannedTensor(msgspec.Struct, frozen=True):
    """A tensor that will be written; `shape` is outermost first."""

    name: str
    format: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        elements, size_bytes = BLOCKS[self.format]
        return math.prod(self.shape) // elements * size_bytes


Content = Callable[[PlannedTensor], bytes]


def write_gguf(
    path: Path, metadata: Mapping[str, MetadataValue], tensors: Sequence[PlannedTensor], content: Content
) -> None:
    """`content` is asked for each tensor's bytes in turn. The file appears by rename, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header_bytes(metadata, tensors))
            for tensor in tensors:
                _write_tensor(file, tensor, content(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def file_bytes(metadata: Mapping[str, MetadataValue], tensors: Sequence[PlannedTensor]) -> int:
    """How large the file will be."""
    return len(header_bytes(metadata, tensors)) + sum(_padded(tensor.size_bytes) for tensor in tensors)


def header_bytes(metadata: Mapping[str, MetadataValue], tensors: Sequence[PlannedTensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_string(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dimensions = tuple(reversed(tensor.shape))
        kind = _TENSOR_KINDS[tensor.format]
        place = struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
        parts.append(_string(tensor.name) + place)
        offset += _padded(tensor.size_bytes)
    header = b"".join(parts)
    return header.ljust(_padded(len(header)), b"\0")


def _write_tensor(file: IO[bytes], tensor: PlannedTensor, data: bytes) -> None:
    if len(data) != tensor.size_bytes:
        raise ValueError(f"{tensor.name} has {len(data)} bytes instead of {tensor.size_bytes}")
    file.write(data)
    file.write(bytes(_padded(len(data)) - len(data)))


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: MetadataValue) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack("<I", _ARRAY) + _array(value)
    kind, code = _KINDS[type(value)]
    return struct.pack("<I" + code, kind, value)


def _array(values: list[str] | list[int] | list[float]) -> bytes:
    if isinstance(values[0], str):
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(_string(str(value)) for value in values)
    kind, code = _SIGNED if isinstance(values[0], int) else _KINDS[float]
    return struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values)
