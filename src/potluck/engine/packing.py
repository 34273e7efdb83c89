"""Repacks a tensor's bytes into groups of 16 rows (kernels/layout.py), losslessly, a slab of groups at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from potluck.engine.formats import Bytes, as_blocks, k_fifth_bits, k_nibbles, q6_integers, six_bit_scales
from potluck.engine.kernels.layout import BLOCK, LAYOUTS, SIX_HIGH_AT, FloatLayout, QuantLayout
from potluck.engine.kernels.processor import ROWS

_SLAB_BYTES = 8 << 20


def pack_slabs(data: Any, format_name: str, rows: int, columns: int) -> Iterator[Bytes]:
    """The packed bytes of a tensor, piece by piece, so that no second copy of a large tensor is ever held."""
    raw = np.frombuffer(data, np.uint8).reshape(rows, -1)
    groups_at_once = max(1, _SLAB_BYTES // (raw.shape[1] * ROWS))
    for first in range(0, rows, groups_at_once * ROWS):
        slab = raw[first : first + groups_at_once * ROWS]
        missing = -len(slab) % ROWS
        if missing:
            slab = np.concatenate([slab, np.zeros((missing, slab.shape[1]), np.uint8)])
        yield pack(slab, format_name, columns)


def pack(raw: Bytes, format_name: str, columns: int) -> Bytes:
    """Whole groups of rows, (rows, bytes), to their packed bytes."""
    layout = LAYOUTS[format_name]
    if isinstance(layout, FloatLayout):
        return _pack_float(raw, layout, columns)
    groups = len(raw) // ROWS
    blocks = as_blocks(raw, format_name, len(raw)).reshape(groups, ROWS, -1, layout.source_bytes)
    blocks = blocks.transpose(0, 2, 1, 3)  # (groups, supers, rows, bytes)
    packed = np.empty((*blocks.shape[:2], layout.super_bytes), np.uint8)
    if layout.scales == "block":
        _pack_plain(blocks, packed, layout)
    else:
        _pack_super(blocks, packed, layout)
    return packed.reshape(-1)


def _pack_float(raw: Bytes, layout: FloatLayout, columns: int) -> Bytes:
    element = {4: np.uint32, 2: np.uint16}[layout.element_bytes]
    padded = np.zeros((len(raw), -(-columns // BLOCK) * BLOCK), element)
    padded[:, :columns] = raw.view(element)
    return np.ascontiguousarray(padded.reshape(-1, ROWS, padded.shape[1]).transpose(0, 2, 1)).view(np.uint8).reshape(-1)


def _by_fours(values: Bytes) -> Any:
    """(…, rows, n) to (…, n / 4 · rows · 4): four columns of a row side by side, then the next row."""
    *front, rows, count = values.shape
    return values.reshape(*front, rows, count // 4, 4).swapaxes(-3, -2).reshape(*front, rows * count)


def _pair_nibbles(values: Bytes) -> Bytes:
    """32 values below 16 to 16 bytes: column i low, column i + 16 high."""
    return (values[..., :16] & 15) | ((values[..., 16:] & 15) << 4)


def _gather_bits(bits: Bytes, width: int) -> Bytes:
    """(…, rows, 32) small values to bytes that hold columns 4j + k for several j at once, `width` bits each."""
    *front, rows, _ = bits.shape
    fours = bits.reshape(*front, rows, width, 8 // width, 4)  # (…, rows, piece, j, k)
    shifts = (np.arange(8 // width, dtype=np.uint8) * width)[:, None]
    pieces = np.bitwise_or.reduce(fours << shifts, axis=-2)  # (…, rows, piece, k)
    return pieces.swapaxes(-3, -2).reshape(*front, -1)


def _pack_plain(blocks: Bytes, packed: Bytes, layout: QuantLayout) -> None:
    packed[..., 0:32] = blocks[..., 0:2].reshape(*packed.shape[:2], 32)
    at = 2
    if layout.has_minimum:
        packed[..., 32:64] = blocks[..., 2:4].reshape(*packed.shape[:2], 32)
        at = 4
    if layout.high_bits:
        bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
        packed[..., layout.high_at : layout.high_at + 64] = _gather_bits(bits, 1)
        at += 4
    quants = blocks[..., at:]
    if layout.bits == 8:
        quants = quants ^ 0x80
    stored = _by_fours(quants)
    packed[..., layout.nibbles_at : layout.nibbles_at + stored.shape[-1]] = stored


def _super_integers(blocks: Bytes, layout: QuantLayout) -> Bytes:
    """Unsigned values of a super-block, (groups, supers, rows, 8, 32)."""
    if layout.name == "Q6_K":
        return q6_integers(blocks)
    if layout.name == "Q5_K":
        return k_nibbles(blocks[..., 48:]) | (k_fifth_bits(blocks[..., 16:48]) << 4)
    return k_nibbles(blocks[..., 16:])


def _six_bits(scales: Bytes, minimums: Bytes) -> Bytes:
    """(…, rows, 8) scales and minimums below 64 to 64 bytes of their upper two bits and 128 of their lower four."""
    scales, minimums = scales.swapaxes(-1, -2), minimums.swapaxes(-1, -2)
    uppers = (scales[..., :4, :], minimums[..., :4, :], scales[..., 4:, :], minimums[..., 4:, :])
    high = np.bitwise_or.reduce([(values >> 4) << 2 * i for i, values in enumerate(uppers)])
    both = np.concatenate([high, (scales & 15) | ((minimums & 15) << 4)], axis=-2)  # (…, 4 + 8, rows)
    return both.reshape(*both.shape[:-2], -1)


def _pack_super(blocks: Bytes, packed: Bytes, layout: QuantLayout) -> None:
    front = packed.shape[:2]
    parts = packed[..., layout.first_part :].reshape(*front, 8, layout.part)
    if layout.name == "Q6_K":
        packed[..., 0:32] = blocks[..., 208:210].reshape(*front, 32)
        sixteens = blocks[..., 192:208].reshape(*front, ROWS, 8, 2)
        for i in range(2):
            parts[..., 16 * i : 16 * i + 16] = sixteens[..., i].swapaxes(-1, -2)
    else:
        packed[..., 0:32] = blocks[..., 0:2].reshape(*front, 32)
        packed[..., 32:64] = blocks[..., 2:4].reshape(*front, 32)
        packed[..., SIX_HIGH_AT:256] = _six_bits(*six_bit_scales(blocks[..., 4:16]))
    integers = _super_integers(blocks, layout).swapaxes(-3, -2)  # (groups, supers, 8, rows, 32)
    parts[..., layout.nibbles_at : layout.nibbles_at + 256] = _by_fours(_pair_nibbles(integers))
    if layout.high_bits:
        gathered = _gather_bits(integers >> 4, layout.high_bits)
        parts[..., layout.high_at : layout.high_at + gathered.shape[-1]] = gathered
