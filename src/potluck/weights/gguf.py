"""Reads GGUF files, versions 2 and 3: metadata as plain Python values, and where each tensor lies.

Every count, length and offset is checked against the file and against the limits below before memory is taken for it.
Knows nothing about what keys and tensors mean.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from potluck.core.errors import BadModelFile, UnknownFormat
from potluck.weights.checkpoint import BLOCKS
from potluck.weights.mapped_file import MappedFile
from potluck.weights.source_tensor import SourceTensor, shown, shown_name

MAX_METADATA_KEYS = 8192
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 256  # of a key or a tensor
MAX_STRING_BYTES = 1 << 22
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays together: tokens, scores, kinds and merges of a million tokens
MAX_ARRAY_DEPTH = 2
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_BOOLEAN, _STRING, _ARRAY = 7, 8, 9
# Value types by number, as struct writes them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOLEAN: "B", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")

_NAMED_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
# What we can size: the formats we compute with, and plain numbers that may lie beside them unused.
_BLOCKS = {**BLOCKS, "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8), "F64": (1, 8)}


class GgufFile:
    """The parsed header, beside the mapping it came from. Closing it is the owner's task."""

    def __init__(
        self, mapped: MappedFile, version: int, metadata: Mapping[str, object], tensors: Mapping[str, SourceTensor]
    ) -> None:
        self.mapped = mapped
        self.version = version
        self.metadata = metadata
        self.tensors = tensors

    @property
    def path(self) -> Path:
        return self.mapped.path

    def __repr__(self) -> str:
        return f"<GgufFile {self.path.name} v{self.version}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"


def read_gguf(mapped: MappedFile) -> GgufFile:
    """Raises BadModelFile, or UnknownFormat for a tensor type whose size we do not know."""
    return _Reader(mapped).read()


class _Reader:
    """A cursor over the header. `_position` never passes the file's end."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped = mapped
        self._data = mapped.data
        self._size = mapped.size_bytes
        self._position = 0
        self._elements_left = MAX_ARRAY_ELEMENTS

    def read(self) -> GgufFile:
        version = self._version()
        tensor_count = self._count("tensor count", MAX_TENSORS, smallest_bytes=32)
        key_count = self._count("metadata count", MAX_METADATA_KEYS, smallest_bytes=13)
        metadata = self._metadata(key_count)
        alignment = self._alignment(metadata)
        infos = self._tensor_infos(tensor_count)
        tensors = self._placed(infos, -(-self._position // alignment) * alignment, alignment)
        return GgufFile(self._mapped, version, metadata, tensors)

    def _version(self) -> int:
        if self._take(4, "magic") != _MAGIC:
            self._fail("magic", "this is not a GGUF file")
        version = self._number("I", "version")
        if version in (0x02000000, 0x03000000):
            self._fail("version", "big-endian files are not supported")
        if version not in (2, 3):
            self._fail("version", f"{version} is not supported; known: 2, 3")
        return int(version)

    def _metadata(self, count: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for index in range(count):
            key = self._name(f"metadata key {index}")
            field = shown_name(key)
            if key in metadata:
                self._fail(field, "this key stands twice")
            kind = int(self._number("I", field))
            # Some vocabularies hold tokens that are pieces of characters; only there may bytes be replaced.
            metadata[key] = self._value(kind, field, "replace" if key == "tokenizer.ggml.tokens" else "strict")
        return metadata

    def _value(self, kind: int, field: str, errors: str, depth: int = 0) -> object:
        if kind == _STRING:
            length = self._count(field, MAX_STRING_BYTES, smallest_bytes=1)
            return self._decoded(self._take(length, field), field, errors)
        if kind == _ARRAY:
            return self._array(field, errors, depth + 1)
        if kind not in _SCALARS:
            self._fail(field, f"unknown value type {kind}")
        value = self._number(_SCALARS[kind], field)
        return self._truth([value], field)[0] if kind == _BOOLEAN else value

    def _array(self, field: str, errors: str, depth: int) -> list[object]:
        if depth > MAX_ARRAY_DEPTH:
            self._fail(field, f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        kind = int(self._number("I", field))
        if kind in (_STRING, _ARRAY):
            count = self._element_count(field, smallest_bytes=8 if kind == _STRING else 12)
            return self._strings(count, field, errors) if kind == _STRING else self._nested(count, field, errors, depth)
        if kind not in _SCALARS:
            self._fail(field, f"unknown array element type {kind}")
        code = _SCALARS[kind]
        size_bytes = struct.calcsize("<" + code)
        count = self._element_count(field, size_bytes)
        start = self._skip(count * size_bytes, field)
        values = list(struct.unpack_from(f"<{count}{code}", self._data, start))
        return self._truth(values, field) if kind == _BOOLEAN else values

    def _nested(self, count: int, field: str, errors: str, depth: int) -> list[object]:
        return [self._array(field, errors, depth + 1) for _ in range(count)]

    def _strings(self, count: int, field: str, errors: str) -> list[object]:
        # The one loop that runs a hundred thousand times: no calls into our own code.
        data, size, position = self._data, self._size, self._position
        result: list[object] = []
        try:
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(data, position)
                start = position + 8
                position = start + length
                if length > MAX_STRING_BYTES or position > size:
                    self._fail(
                        field, f"string {len(result)} has {length} bytes, more than the file or the limit allows"
                    )
                result.append(data[start:position].decode("utf-8", errors))
        except struct.error:
            self._fail(field, f"the file ends before string {len(result)}")
        except UnicodeDecodeError:
            self._fail(field, f"string {len(result)} is not UTF-8")
        self._position = position
        return result

    def _tensor_infos(self, count: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Name → format, shape and offset in the data section."""
        infos: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for index in range(count):
            name = self._name(f"tensor {index}")
            field = f"tensor {shown_name(name)}"
            if name in infos:
                self._fail(field, "this tensor stands twice")
            dimension_count = int(self._number("I", field))
            if not 1 <= dimension_count <= MAX_DIMENSIONS:
                self._fail(field, f"has {dimension_count} dimensions, not 1 to {MAX_DIMENSIONS}")
            dimensions = [int(self._number("Q", field)) for _ in range(dimension_count)]
            kind = int(self._number("I", field))
            infos[name] = (self._format(kind, field), tuple(reversed(dimensions)), int(self._number("Q", field)))
        return infos

    def _format(self, kind: int, field: str) -> str:
        name = _NAMED_TYPES.get(kind)
        if name not in _BLOCKS:
            raise UnknownFormat(
                self._mapped.path, field, f"format {name or kind} is not supported; known: {', '.join(BLOCKS)}"
            )
        return name

    def _placed(
        self, infos: Mapping[str, tuple[str, tuple[int, ...], int]], data_start: int, alignment: int
    ) -> dict[str, SourceTensor]:
        tensors: dict[str, SourceTensor] = {}
        end, last = data_start, ""
        for name in sorted(infos, key=lambda name: infos[name][2]):
            tensor = self._tensor(name, infos[name], data_start, alignment)
            if tensor.offset < end:
                self._fail(f"tensor {shown_name(name)}", f"overlaps {shown(last)}")
            end, last = tensor.offset + tensor.size_bytes, name
            tensors[name] = tensor
        return tensors

    def _tensor(
        self, name: str, info: tuple[str, tuple[int, ...], int], data_start: int, alignment: int
    ) -> SourceTensor:
        format_name, shape, offset = info
        field = f"tensor {shown_name(name)}"
        block_elements, block_bytes = _BLOCKS[format_name]
        if min(shape) == 0:
            self._fail(field, f"has an empty dimension: {shape}")
        if shape[-1] % block_elements:
            self._fail(field, f"rows of {shape[-1]} do not fill blocks of {block_elements} ({format_name})")
        if offset % alignment:
            self._fail(field, f"offset {offset} is not a multiple of the alignment {alignment}")
        size_bytes = math.prod(shape) // block_elements * block_bytes
        if data_start + offset + size_bytes > self._size:
            self._fail(field, f"{size_bytes} bytes at offset {offset} go past the end of the file")
        return SourceTensor(name, format_name, shape, self._mapped.path, data_start + offset, size_bytes)

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in (8 << shift for shift in range(14)):
            self._fail("general.alignment", f"{shown(alignment)} is not a power of two from 8 to 65536")
        return alignment

    def _name(self, field: str) -> str:
        length = self._count(field, MAX_NAME_BYTES, smallest_bytes=1)
        if length == 0:
            self._fail(field, "has no name")
        return self._decoded(self._take(length, field), field, "strict")

    def _count(self, field: str, limit: int, smallest_bytes: int) -> int:
        """A count of things that take at least `smallest_bytes` each, so that the file's end bounds it as well."""
        count = int(self._number("Q", field))
        if count > limit:
            self._fail(field, f"{count} is more than the limit of {limit}")
        if count * smallest_bytes > self._size - self._position:
            self._fail(field, f"{count} is more than the rest of the file can hold")
        return count

    def _element_count(self, field: str, smallest_bytes: int) -> int:
        count = self._count(field, self._elements_left, smallest_bytes)
        self._elements_left -= count
        return count

    def _number(self, code: str, field: str) -> int | float:
        (value,) = struct.unpack_from("<" + code, self._data, self._skip(struct.calcsize("<" + code), field))
        assert isinstance(value, int | float)
        return value

    def _take(self, size_bytes: int, field: str) -> bytes:
        start = self._skip(size_bytes, field)
        return self._data[start : self._position]

    def _skip(self, size_bytes: int, field: str) -> int:
        """Moves on, and returns where the skipped bytes start."""
        start = self._position
        if size_bytes > self._size - start:
            self._fail(field, "the file ends here")
        self._position = start + size_bytes
        return start

    def _truth(self, values: list[object], field: str) -> list[object]:
        if any(value not in (0, 1) for value in values):
            self._fail(field, "a boolean is neither 0 nor 1")
        return [value == 1 for value in values]

    def _decoded(self, data: bytes, field: str, errors: str) -> str:
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError:
            self._fail(field, "is not UTF-8")

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise BadModelFile(self._mapped.path, field, problem)
