"""Weight matrices on a device: floats as they are in the file, or quantised blocks in a layout that a warp reads in one go.

4-bit blocks become words: word j of a block of 32 holds elements j, j + 4, … j + 28, lowest bits first. Wider ones become bytes.
Repacking is lossless; no float copy of a quantised matrix is ever kept.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from potluck.core.errors import UnknownFormat
from potluck.engine.formats import READERS, as_blocks, k_nibbles, six_bit_scales, to_float32
from potluck.weights.checkpoint import Checkpoint

BLOCK = 32
# How a group's scale and minimum are kept. `plain`: fp16 scale. `affine`: fp16 scale and minimum. `super`: 6-bit scale and minimum
# as bytes, times an fp16 pair for 256 columns. `sixteens`: a signed byte for 16 columns, times an fp16 for 256.
ScaleKind = Literal["plain", "affine", "super", "sixteens"]
SCALE_KINDS: tuple[ScaleKind, ...] = ("plain", "affine", "super", "sixteens")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SLAB_BYTES = 256 << 20  # rows that are repacked at a time


@dataclass(frozen=True)
class DenseMatrix:
    weight: torch.Tensor  # (rows, columns)

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])

    @property
    def columns(self) -> int:
        return int(self.weight.shape[1])

    @property
    def size_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def key(self) -> str:
        """What two matrices must share to be one."""
        return str(self.weight.dtype)

    def floats(self, first: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.weight[first:stop].float()

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, rows).float()


@dataclass(frozen=True)
class BlockMatrix:
    quants: torch.Tensor  # 4 bits: int32 (rows, columns / 8); 8 bits: int8 (rows, columns)
    scales: torch.Tensor  # plain: fp16 (rows, groups); affine: fp16 (rows, groups, 2); otherwise bytes, likewise
    supers: torch.Tensor | None  # super: fp16 (rows, columns / 256, 2); sixteens: fp16 (rows, columns / 256)
    kind: ScaleKind
    bits: int
    zero: int  # subtracted from each quant
    columns: int

    @property
    def rows(self) -> int:
        return int(self.quants.shape[0])

    @property
    def group(self) -> int:
        return 16 if self.kind == "sixteens" else BLOCK

    @property
    def size_bytes(self) -> int:
        parts = [self.quants, self.scales, *([] if self.supers is None else [self.supers])]
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def key(self) -> str:
        return f"{self.kind} {self.bits} {self.zero}"

    def floats(self, first: int = 0, stop: int | None = None) -> torch.Tensor:
        rows = slice(first, stop)
        return self._dequantised(
            self.quants[rows], self.scales[rows], None if self.supers is None else self.supers[rows]
        )

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        supers = None if self.supers is None else self.supers.index_select(0, rows)
        return self._dequantised(self.quants.index_select(0, rows), self.scales.index_select(0, rows), supers)

    def _dequantised(self, quants: torch.Tensor, scales: torch.Tensor, supers: torch.Tensor | None) -> torch.Tensor:
        count = quants.shape[0]
        if self.bits == 4:
            words = quants.view(count, -1, 4, 1)
            shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=quants.device)
            nibbles = (words >> shifts) & 15  # (rows, blocks, 4, 8): element 4 i + j at [j, i]
            integers = nibbles.transpose(2, 3).reshape(count, -1, self.group)
        else:
            integers = quants.view(count, -1, self.group)
        scale, minimum = self._scales(scales, supers)
        values = (integers - self.zero).float() * scale[..., None]
        if minimum is not None:
            values = values + minimum[..., None]
        return values.reshape(count, self.columns)

    def _scales(self, scales: torch.Tensor, supers: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.kind == "plain":
            return scales.float(), None
        if self.kind == "affine":
            return scales[..., 0].float(), scales[..., 1].float()
        assert supers is not None
        wide = supers.float().repeat_interleave(256 // self.group, dim=1)
        if self.kind == "sixteens":
            return wide * scales.float(), None
        return wide[..., 0] * scales[..., 0].float(), -wide[..., 1] * scales[..., 1].float()


Matrix = DenseMatrix | BlockMatrix


def joined(matrices: list[Matrix]) -> Matrix | None:
    """One matrix with the rows of all, where they are of one kind."""
    if len({matrix.key for matrix in matrices}) != 1:
        return None
    if len(matrices) == 1:
        return matrices[0]
    first = matrices[0]
    if isinstance(first, DenseMatrix):
        return DenseMatrix(torch.cat([each.weight for each in matrices if isinstance(each, DenseMatrix)]))
    blocks = [each for each in matrices if isinstance(each, BlockMatrix)]
    supers = [each.supers for each in blocks if each.supers is not None]
    return BlockMatrix(
        torch.cat([each.quants for each in blocks]), torch.cat([each.scales for each in blocks]),
        torch.cat(supers) if supers else None, first.kind, first.bits, first.zero, first.columns,
    )  # fmt: skip


def read_vector(checkpoint: Checkpoint, name: str, device: torch.device) -> torch.Tensor:
    """Norms and biases as float32, with Gemma's one added."""
    values = to_float32(checkpoint.read(name), checkpoint.tensors[name].format).copy()
    if name.endswith("norm") and checkpoint.facts.norm_weight_plus_one:
        values += np.float32(1.0)
    return torch.from_numpy(values).to(device)


def read_matrix(checkpoint: Checkpoint, name: str, device: torch.device) -> Matrix:
    """Raises UnknownFormat, naming the tensor, for blocks that we have no lossless layout for."""
    entry = checkpoint.tensors[name]
    rows, columns = entry.shape
    data = np.frombuffer(checkpoint.read(name), np.uint8)
    if entry.format in _FLOATS:
        return _read_floats(data, entry.format, rows, columns, device)
    if entry.format not in _REPACK:
        raise UnknownFormat(entry.file, f"tensor {entry.source_name}", f"{entry.format} is not supported on a GPU")
    blocks = as_blocks(data, entry.format, rows)
    slab = max(1, _SLAB_BYTES // max(1, blocks[0].nbytes))
    parts = [_REPACK[entry.format](blocks[first : first + slab]) for first in range(0, rows, slab)]
    whole: list[torch.Tensor | None] = [
        None if parts[0][i] is None else torch.cat([torch.from_numpy(part[i]).to(device) for part in parts])
        for i in range(3)
    ]
    kind, bits, zero = BLOCK_KINDS[entry.format]
    assert whole[0] is not None
    assert whole[1] is not None
    return BlockMatrix(whole[0], whole[1], whole[2], kind, bits, zero, columns)


def _read_floats(data: Any, format_name: str, rows: int, columns: int, device: torch.device) -> DenseMatrix:
    weight = torch.empty((rows, columns), dtype=_FLOATS[format_name], device=device)
    flat = weight.view(-1).view(torch.uint8)
    for first in range(0, len(data), _SLAB_BYTES):
        part = data[first : first + _SLAB_BYTES]
        flat[first : first + len(part)].copy_(torch.from_numpy(part.copy()))
    return DenseMatrix(weight)


BLOCK_KINDS: dict[str, tuple[ScaleKind, int, int]] = {
    "Q4_0": ("plain", 4, 8),
    "Q4_1": ("affine", 4, 0),
    "Q5_0": ("plain", 8, 0),
    "Q5_1": ("affine", 8, 0),
    "Q8_0": ("plain", 8, 0),
    "Q4_K": ("super", 4, 0),
    "Q5_K": ("super", 8, 0),
    "Q6_K": ("sixteens", 8, 0),
}
Parts = tuple[Any, Any, Any]  # quants, scales, supers: numpy arrays


def as_words(nibbles: Any) -> Any:
    """(rows, blocks, 32) values below 16 as (rows, 4 · blocks) words."""
    by_place = nibbles.astype(np.uint32).reshape(*nibbles.shape[:-1], 8, 4)  # [i, j]: element 4 i + j
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    words = np.bitwise_or.reduce(by_place << shifts, axis=-2)
    return words.reshape(len(words), -1).view(np.int32)


def _halves(raw: Any) -> Any:
    return np.ascontiguousarray(raw).view(np.float16)


def _repack_q4(blocks: Any, head_bytes: int) -> Parts:
    raw = blocks[..., head_bytes:]
    nibbles = np.concatenate([raw & 15, raw >> 4], axis=-1)
    halves = _halves(blocks[..., :head_bytes])
    return as_words(nibbles), halves[..., 0].copy() if head_bytes == 2 else halves, None


def _repack_bytes(format_name: str, scale_halves: int) -> Any:
    def repack(blocks: Any) -> Parts:
        integers = READERS[format_name](blocks).integers.astype(np.int8)
        halves = _halves(blocks[..., : 2 * scale_halves])
        return integers.reshape(len(blocks), -1), halves[..., 0].copy() if scale_halves == 1 else halves, None

    return repack


def _super_scales(blocks: Any) -> tuple[Any, Any]:
    scales, minimums = six_bit_scales(blocks[..., 4:16])
    pairs = np.stack([scales, minimums], axis=-1)  # (rows, supers, 8, 2)
    return pairs.reshape(len(blocks), -1, 2), _halves(blocks[..., :4])


def _repack_q4_k(blocks: Any) -> Parts:
    nibbles = k_nibbles(blocks[..., 16:])
    return as_words(nibbles.reshape(len(blocks), -1, BLOCK)), *_super_scales(blocks)


def _repack_q5_k(blocks: Any) -> Parts:
    integers = READERS["Q5_K"](blocks).integers.astype(np.int8)
    return integers.reshape(len(blocks), -1), *_super_scales(blocks)


def _repack_q6_k(blocks: Any) -> Parts:
    integers = READERS["Q6_K"](blocks).integers.astype(np.int8)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1)
    return integers.reshape(len(blocks), -1), scales, _halves(blocks[..., 208:210])[..., 0].copy()


_REPACK: dict[str, Any] = {
    "Q4_0": lambda blocks: _repack_q4(blocks, 2),
    "Q4_1": lambda blocks: _repack_q4(blocks, 4),
    "Q5_0": _repack_bytes("Q5_0", 1),
    "Q5_1": _repack_bytes("Q5_1", 2),
    "Q8_0": _repack_bytes("Q8_0", 1),
    "Q4_K": _repack_q4_k,
    "Q5_K": _repack_q5_k,
    "Q6_K": _repack_q6_k,
}
