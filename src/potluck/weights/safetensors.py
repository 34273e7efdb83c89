"""Reads safetensors files, alone or as a folder with an index: where each tensor lies, not what it means.

Sizes and counts are checked before memory is taken; names in an index cannot lead out of their folder.
"""

import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from potluck.core.errors import BadModelFile, UnknownFormat
from potluck.weights.json_objects import parse_json_object, read_json_object
from potluck.weights.mapped_file import MappedFile
from potluck.weights.source_tensor import SourceTensor, shown, shown_name

MAX_HEADER_BYTES = 4 << 20  # JSON takes up to twenty times its length in memory; a thousand layers need half of this
MAX_INDEX_BYTES = 4 << 20
MAX_TENSORS = 65_536
MAX_FILES = 1024
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Bytes of one element. Only F32, F16 and BF16 are computed with; the others may lie beside them, unused.
_ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip

_Extent = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[list[_Extent], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Extent, _Extent]


def read_safetensors(mapped: MappedFile) -> dict[str, SourceTensor]:
    """The tensors of one file, in the order of their bytes, which they must tile without holes or overlaps."""
    header_bytes = _header_length(mapped)
    header = parse_json_object(mapped.data[8 : 8 + header_bytes], mapped.path, "header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise BadModelFile(mapped.path, "header", f"{len(header)} tensors are more than the limit of {MAX_TENSORS}")
    tensors = [_tensor(mapped, name, value, 8 + header_bytes) for name, value in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    _check_tiling(mapped, tensors, 8 + header_bytes)
    return {tensor.name: tensor for tensor in tensors}


def open_safetensors_folder(folder: Path) -> tuple[dict[str, SourceTensor], dict[Path, MappedFile]]:
    """All tensors of a model folder, and the mappings they lie in, which the caller closes."""
    index = read_index(folder) if (folder / INDEX_NAME).exists() else None
    names = [SINGLE_NAME] if index is None else sorted(set(index.values()))
    files: dict[Path, MappedFile] = {}
    try:
        found: dict[str, dict[str, SourceTensor]] = {}
        for name in names:
            path = plain_file(folder, name)
            files[path] = MappedFile(path)
            found[name] = read_safetensors(files[path])
        return (found[SINGLE_NAME] if index is None else _indexed(folder, index, found)), files
    except BaseException:
        for mapped in files.values():
            mapped.close()
        raise


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name → file name, as the folder's index has it."""
    path = plain_file(folder, INDEX_NAME)
    content = read_json_object(path, MAX_INDEX_BYTES)
    try:
        index = msgspec.convert(content.get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise BadModelFile(path, "weight_map", str(error)) from None
    if not index or len(index) > MAX_TENSORS:
        raise BadModelFile(path, "weight_map", f"names {len(index)} tensors, not 1 to {MAX_TENSORS}")
    if len(set(index.values())) > MAX_FILES:
        raise BadModelFile(path, "weight_map", f"names more than {MAX_FILES} files")
    for name in set(index.values()):
        if not name.endswith(".safetensors"):
            raise BadModelFile(path, "weight_map", f"{shown(name)} is not the name of a safetensors file")
    return index


def plain_file(folder: Path, name: str) -> Path:
    """`folder / name`, for a regular file that lies in the folder itself; `name` may come from an untrusted file."""
    if name != Path(name).name or name in ("", ".", "..") or any(letter in name for letter in "/\\:\0"):
        raise BadModelFile(folder, "file name", f"{shown(name)} is not a plain file name")
    path = folder / name
    try:
        # A link within the folder is harmless; one that leads out could read anything the user can.
        is_inside = path.resolve(strict=True).parent in _homes(folder.resolve(strict=True))
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, RuntimeError, ValueError):
        raise BadModelFile(folder, shown_name(name), "this file is missing") from None
    if not is_inside:
        raise BadModelFile(folder, name, "is a link that leads out of the folder")
    if not is_regular:
        raise BadModelFile(folder, name, "is not a regular file")
    return path


def _homes(folder: Path) -> tuple[Path, ...]:
    """Where a folder's files may lie. In the cache of Hugging Face's own tools a snapshot is links to the blobs beside it."""
    return (folder, folder.parent.parent / "blobs") if folder.parent.name == "snapshots" else (folder,)


def _header_length(mapped: MappedFile) -> int:
    if mapped.size_bytes < 8:
        raise BadModelFile(mapped.path, "header length", "the file ends here")
    length = int.from_bytes(mapped.data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise BadModelFile(mapped.path, "header length", f"{length} is more than the limit of {MAX_HEADER_BYTES}")
    if 8 + length > mapped.size_bytes:
        raise BadModelFile(mapped.path, "header length", f"{length} goes past the end of the file")
    return length


def _tensor(mapped: MappedFile, name: str, value: object, data_start: int) -> SourceTensor:
    field = f"tensor {shown_name(name)}"
    try:
        header = msgspec.convert(value, _Header)
    except msgspec.ValidationError as error:
        raise BadModelFile(mapped.path, field, shown(str(error), 200)) from None
    except UnicodeEncodeError:
        raise BadModelFile(mapped.path, field, "has text that is not valid Unicode") from None
    if header.dtype not in _ELEMENT_BYTES:
        raise UnknownFormat(mapped.path, field, f"format {shown(header.dtype)} is not supported; known: F32, F16, BF16")
    start, stop = header.data_offsets
    size_bytes = math.prod(header.shape) * _ELEMENT_BYTES[header.dtype]
    if stop - start != size_bytes:
        raise BadModelFile(mapped.path, field, f"has {stop - start} bytes; its shape asks for {size_bytes}")
    if data_start + stop > mapped.size_bytes:
        raise BadModelFile(mapped.path, field, f"{size_bytes} bytes at offset {start} go past the end of the file")
    return SourceTensor(name, header.dtype, tuple(header.shape), mapped.path, data_start + start, size_bytes)


def _check_tiling(mapped: MappedFile, tensors: list[SourceTensor], data_start: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            raise BadModelFile(mapped.path, f"tensor {shown_name(tensor.name)}", problem)
        end += tensor.size_bytes
    if end != mapped.size_bytes:
        raise BadModelFile(mapped.path, "data", f"{mapped.size_bytes - end} bytes at the end belong to no tensor")


def _indexed(
    folder: Path, index: Mapping[str, str], found: Mapping[str, Mapping[str, SourceTensor]]
) -> dict[str, SourceTensor]:
    result: dict[str, SourceTensor] = {}
    for name, file_name in index.items():
        tensor = found[file_name].get(name)
        if tensor is None:
            raise BadModelFile(folder / INDEX_NAME, f"weight_map {shown_name(name)}", f"is not in {shown(file_name)}")
        result[name] = tensor
    return result
