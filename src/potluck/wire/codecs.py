"""Activations to bytes and back: fp32, fp16, int8 in blocks of 32 with float32 scales. Plain numpy; the same bits on every machine.

Rows are encoded one by one, so that a slice of rows is a slice of bytes. What was rounded once stays as it is: encoding a decoded
array again yields the same bytes. What is not a finite number arrives as NaN in every codec but fp32, so that the receiver notices.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.core.errors import ProtocolViolation
from potluck.wire.messages import Codec

BLOCK = 32
FP16_MAX = 65504.0

Rows = npt.NDArray[np.float32]  # (count, width)

_FLOAT32 = np.dtype("<f4")
_FLOAT16 = np.dtype("<f2")
_IS_BIG_ENDIAN = sys.byteorder == "big"
# Blocks whose scale would be below the smallest normal number become zero: there max / 127 loses bits, and rounding twice would
# differ from rounding once. Above it, it never does (shown in the tests for every significand).
_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_SCALE = np.float32(
    2.0**120
)  # above it 127 times the scale might not be finite, and no model gets anywhere near


def encode(codec: Codec, rows: Rows) -> bytes:
    """The bytes for a float32 array (count, width)."""
    return _CODECS[codec].encode(rows)


def decode(codec: Codec, data: bytes | memoryview, count: int, width: int) -> Rows:
    """An array (count, width), perhaps read-only. Raises ProtocolViolation when the length does not fit."""
    coding = _CODECS[codec]
    if len(data) != count * -(-width // coding.block) * coding.block_bytes:
        raise ProtocolViolation(f"activations of {len(data)} bytes do not hold {count} rows of {width} in {codec}")
    return coding.decode(data, count, width)


def encoded_bytes(codec: Codec, count: int, width: int) -> int:
    """How long `count` rows are; each takes the same."""
    coding = _CODECS[codec]
    return count * -(-width // coding.block) * coding.block_bytes


def check_rows(rows: Rows, limit: float) -> str | None:
    """What is wrong with activations: NaN, Inf, or a row whose Euclidean norm is above the limit; None: nothing."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.vecdot(rows, rows)  # (count,); carries NaN and Inf along, and is Inf where a square is too large
    wrong = ~(squares <= limit * limit)
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    if not np.isfinite(rows[row]).all():
        return f"row {row} holds NaN or Inf"
    return f"row {row} has norm {float(np.sqrt(squares[row])):.3g}, above {limit:.3g}"


def _encode_fp32(rows: Rows) -> bytes:
    return rows.astype(_FLOAT32, copy=False).tobytes() if _IS_BIG_ENDIAN else rows.tobytes()


def _decode_fp32(data: bytes | memoryview, count: int, width: int) -> Rows:
    rows: Rows = np.ndarray((count, width), _FLOAT32, data)
    return rows.astype(np.float32, copy=False) if _IS_BIG_ENDIAN else rows


def _encode_fp16(rows: Rows) -> bytes:
    halves = rows.clip(-FP16_MAX, FP16_MAX).astype(_FLOAT16)  # rounds to nearest even
    is_finite = np.isfinite(rows)
    if not is_finite.all():
        halves[~is_finite] = np.nan
    return halves.tobytes()


def _decode_fp16(data: bytes | memoryview, count: int, width: int) -> Rows:
    return np.frombuffer(data, _FLOAT16).reshape(count, width).astype(np.float32)


def _encode_int8(rows: Rows) -> bytes:
    count, width = rows.shape
    blocks = -(-width // BLOCK)
    if width % BLOCK:
        rows = np.pad(rows, ((0, 0), (0, blocks * BLOCK - width)))
    values = rows.reshape(count, blocks, BLOCK)
    scales = np.abs(values).max(axis=2) / np.float32(127)
    if ((scales >= _SMALLEST_SCALE) & (scales <= _LARGEST_SCALE)).all():
        quotients = values / scales[:, :, None]
    else:
        scales, quotients = _scale_oddities(values, scales)
    encoded = np.empty((count, blocks * (4 + BLOCK)), np.uint8)
    encoded[:, : blocks * 4] = scales.astype(_FLOAT32, copy=False).view(np.uint8)
    encoded[:, blocks * 4 :].view(np.int8)[:] = np.rint(quotients, out=quotients).reshape(count, blocks * BLOCK)
    return encoded.tobytes()


def _scale_oddities(values: Rows, scales: Rows) -> tuple[Rows, Rows]:
    """Scales and quotients where some blocks are (almost) zero, and get scale 0, or not finite (almost), and get NaN."""
    is_usual = (scales >= _SMALLEST_SCALE) & (scales <= _LARGEST_SCALE)
    scales = np.where(is_usual, scales, np.where(scales < _SMALLEST_SCALE, np.float32(0), np.float32(np.nan)))
    quotients = np.zeros_like(values)
    np.divide(values, scales[:, :, None], out=quotients, where=is_usual[:, :, None])
    return scales, quotients


def _decode_int8(data: bytes | memoryview, count: int, width: int) -> Rows:
    blocks = -(-width // BLOCK)
    encoded = np.frombuffer(data, np.uint8).reshape(count, blocks * (4 + BLOCK))
    scales = np.ascontiguousarray(encoded[:, : blocks * 4]).view(_FLOAT32).astype(np.float32, copy=False)
    values = encoded[:, blocks * 4 :].view(np.int8).reshape(count, blocks, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # a peer's scales may be anything; check_rows finds out
        rows = values * scales[:, :, None]
    return rows.reshape(count, blocks * BLOCK)[:, :width]


class _Coding(NamedTuple):
    encode: Callable[[Rows], bytes]
    decode: Callable[[bytes | memoryview, int, int], Rows]
    block: int  # values that are coded together; a row is whole blocks
    block_bytes: int


_CODECS: dict[Codec, _Coding] = {
    "fp32": _Coding(_encode_fp32, _decode_fp32, 1, 4),
    "fp16": _Coding(_encode_fp16, _decode_fp16, 1, 2),
    "int8": _Coding(_encode_int8, _decode_int8, BLOCK, 4 + BLOCK),
}
