"""Packed tensors on disk: one file per layer (and one for the output), beside the model, mapped read-only.

A file names its source's hash and the layout's version in its header and appears by rename, so a reader sees all of it or nothing.
Where the disk is full or read-only the packed form lives in memory instead.
"""

import contextlib
import hashlib
import io
import logging
import math
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.engine.kernels.layout import LAYOUT_VERSION, LAYOUTS, Layout
from potluck.engine.kernels.processor import ROWS
from potluck.engine.packing import pack_slabs
from potluck.engine.system_memory import in_large_pages, private_memory, read_in_large_pages
from potluck.weights.checkpoint import Checkpoint, TensorEntry

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 4096
_PREFIX = ".packing-"
_ABANDONED_AFTER_S = 3600.0
_PIECE_BYTES = 4 << 20  # a multiple of every size that a large page has
_HEADER_BEGIN = b'{"layout_version":'
_TAIL_BYTES = 8192  # kernels prefetch past the end of a tensor; keep that inside the mapping


class PackedTensor(msgspec.Struct, frozen=True):
    """A packed matrix in memory; `memory` keeps it alive."""

    name: str
    layout: Layout
    rows: int
    columns: int
    address: int
    memory: npt.NDArray[np.uint8]

    @property
    def groups(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def group_bytes(self) -> int:
        return self.layout.packed_bytes(ROWS, self.columns)


class _Place(msgspec.Struct, frozen=True):
    name: str
    format: str
    rows: int
    columns: int
    offset: int
    size_bytes: int


class _Header(msgspec.Struct, frozen=True):
    layout_version: int
    source: str
    places: tuple[_Place, ...]
    total_bytes: int


def _round_up(value: int) -> int:
    return -(-value // _ALIGNMENT) * _ALIGNMENT


def _plan(entries: Sequence[TensorEntry], source: str) -> _Header:
    places = []
    offset = _ALIGNMENT * 4  # the header's room
    for entry in entries:
        rows, columns = entry.shape
        size = LAYOUTS[entry.format].packed_bytes(rows, columns)
        places.append(_Place(entry.name, entry.format, rows, columns, offset, size))
        offset = _round_up(offset + size)
    return _Header(LAYOUT_VERSION, source, tuple(places), offset + _TAIL_BYTES)


class PackedCache:
    """Packs what a shard needs, or finds it packed. `source` identifies the model's content (its weights_sha256)."""

    def __init__(self, folder: Path | None, source: str) -> None:
        self._folder = folder
        self._source = source
        self._may_write = True  # until the disk is full once: every further unit would fill it again

    def load(self, checkpoint: Checkpoint, unit: str, names: Sequence[str]) -> dict[str, PackedTensor]:
        """The packed matrices `names`; `unit` is the file's name."""
        header = _plan([checkpoint.tensors[name] for name in names], self._source)
        memory = self._map(header, unit)
        if memory is None:
            memory = self._pack(checkpoint, header, unit)
        return {place.name: _tensor(place, memory) for place in header.places}

    def _path(self, header: _Header, unit: str) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(msgspec.json.encode(header)).hexdigest()[:16]
        return self._folder / f"{unit}.{digest}.packed"

    def _map(self, header: _Header, unit: str) -> npt.NDArray[np.uint8] | None:
        path = self._path(header, unit)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != header.total_bytes:
                    return None
                # The header too is read through the mapping: reading it as a file would fetch small pages before large ones are asked for.
                mapped = in_large_pages(mmap.mmap(file.fileno(), header.total_bytes, access=mmap.ACCESS_READ))
                read_in_large_pages(mapped)
        except OSError:
            return None
        expected = msgspec.json.encode(header)
        return np.frombuffer(mapped, np.uint8) if mapped[: len(expected)] == expected else None

    def _pack(self, checkpoint: Checkpoint, header: _Header, unit: str) -> npt.NDArray[np.uint8]:
        path = self._path(header, unit)
        if path is not None and self._may_write:
            try:
                _write(path, checkpoint, header)
            except OSError as error:
                self._may_write = False
                _LOG.warning("cannot keep packed weights in %s (%s); holding them in memory", path.parent, error)
            else:
                memory = self._map(header, unit)
                if memory is not None:
                    return memory
        memory = np.frombuffer(in_large_pages(private_memory(header.total_bytes)), np.uint8)
        for place in header.places:
            at = place.offset
            for slab in pack_slabs(checkpoint.read(place.name), place.format, place.rows, place.columns):
                memory[at : at + len(slab)] = slab
                at += len(slab)
            checkpoint.forget(place.name)
        return memory


def _write(path: Path, checkpoint: Checkpoint, header: _Header) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            pieces = _PieceWriter(file)
            pieces.write(msgspec.json.encode(header))
            for place in header.places:
                pieces.fill_up_to(place.offset)
                for slab in pack_slabs(checkpoint.read(place.name), place.format, place.rows, place.columns):
                    pieces.write(slab.data)
                checkpoint.forget(place.name)
            pieces.fill_up_to(header.total_bytes)
            pieces.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _remove_outdated(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class _PieceWriter:
    """Passes on what is written in large pieces that begin at multiples of their size: such files get large pages."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._filled = self._written = 0

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            part = left[: _PIECE_BYTES - self._filled]
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == _PIECE_BYTES:
                self.flush()

    def fill_up_to(self, offset: int) -> None:
        self.write(bytes(offset - self._written - self._filled))

    def flush(self) -> None:
        left = self._piece[: self._filled]
        while left:
            left = left[self._file.write(left) :]
        self._written += self._filled
        self._filled = 0


def _sweep(folder: Path) -> None:
    """Removes what processes left that were killed while packing; younger files may still be written."""
    oldest = time.time() - _ABANDONED_AFTER_S
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process has finished it
            if path.stat().st_mtime < oldest:
                path.unlink()


def _remove_outdated(path: Path) -> None:
    """What was there in `path`'s stead before the layout changed: as large as the weights, and of no use to this version or a later one."""
    unit = path.name.split(".")[0]
    for other in path.parent.glob(f"{unit}.*.packed"):
        with contextlib.suppress(OSError):  # removed by another process, or mapped by one where that forbids it
            if other != path and _version_of(other) < LAYOUT_VERSION:
                other.unlink()


def _version_of(path: Path) -> float:
    with path.open("rb") as file:
        begin = file.read(len(_HEADER_BEGIN) + 8)
    number = begin.removeprefix(_HEADER_BEGIN).partition(b",")[0]
    return int(number) if begin.startswith(_HEADER_BEGIN) and number.isdigit() else math.inf  # not ours to judge


def _tensor(place: _Place, memory: npt.NDArray[np.uint8]) -> PackedTensor:
    address = memory.ctypes.data + place.offset
    return PackedTensor(place.name, LAYOUTS[place.format], place.rows, place.columns, address, memory)
