"""What the file's bytes mean, in numpy: integers, scales and minimums of every format, and rows as float32.

This is the plain reading of each format, used for embedding rows and as the reference for the packed form and the kernels.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.weights.checkpoint import BLOCKS

Bytes = Any  # uint8 arrays; numpy's stubs lose that at every shift
Floats = npt.NDArray[np.float32]


class Quantised(NamedTuple):
    """Rows of blocks of 32: signed integers, float32 scale and minimum; `sixteens` are the two further scales of a Q6_K block."""

    integers: npt.NDArray[np.int16]  # (rows, blocks, 32)
    scale: Floats  # (rows, blocks)
    minimum: Floats | None  # (rows, blocks)
    sixteens: npt.NDArray[np.int32] | None  # (rows, blocks, 2)


def as_blocks(data: Any, format_name: str, rows: int) -> Bytes:
    """The bytes of `rows` rows as (rows, blocks, bytes of a block)."""
    raw = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    return raw.reshape(rows, -1, BLOCKS[format_name][1])


def _halves(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """16 bytes to 32 values: low halves first."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """4 bytes to 32 values of 0 or 16."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def read_q4_0(b: Bytes) -> Quantised:
    return Quantised(_nibbles(b[..., 2:]).astype(np.int16) - 8, _halves(b[..., :2]), None, None)


def read_q4_1(b: Bytes) -> Quantised:
    return Quantised(_nibbles(b[..., 4:]).astype(np.int16), _halves(b[..., :2]), _halves(b[..., 2:4]), None)


def read_q5_0(b: Bytes) -> Quantised:
    integers = (_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])).astype(np.int16) - 16
    return Quantised(integers, _halves(b[..., :2]), None, None)


def read_q5_1(b: Bytes) -> Quantised:
    integers = (_nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8])).astype(np.int16)
    return Quantised(integers, _halves(b[..., :2]), _halves(b[..., 2:4]), None)


def read_q8_0(b: Bytes) -> Quantised:
    integers = np.ascontiguousarray(b[..., 2:]).view(np.int8).astype(np.int16)
    return Quantised(integers, _halves(b[..., :2]), None, None)


def six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes to 8 scales and 8 minimums of 6 bits, as Q4_K and Q5_K keep them."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scales, minimums


def k_nibbles(raw: Bytes) -> Bytes:
    """128 bytes to (8, 32): each 32 bytes hold one block in their low and the next in their high halves."""
    pairs = raw.reshape(*raw.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*raw.shape[:-1], 8, 32)


def k_fifth_bits(raw: Bytes) -> Bytes:
    """32 bytes to (8, 32) of 0 or 1: bit j of byte i belongs to block j."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    return (raw[..., None, :] >> shifts) & 1


def q6_integers(b: Bytes) -> Bytes:
    """Q6_K's 256 unsigned 6-bit values as (8, 32)."""
    low = b[..., :128].reshape(*b.shape[:-1], 2, 2, 32)  # (half, 32-byte piece)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-2)  # (half, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (nibbles | (((high >> shifts) & 3) << 4)).reshape(*b.shape[:-1], 8, 32)


def _flat(values: npt.NDArray[Any]) -> Any:
    """(rows, supers, 8, …) to (rows, blocks, …)."""
    return values.reshape(values.shape[0], -1, *values.shape[3:])


def _read_super(b: Bytes, integers: Bytes) -> Quantised:
    scales, minimums = six_bit_scales(b[..., 4:16])
    d, dmin = _halves(b[..., 0:2])[..., None], _halves(b[..., 2:4])[..., None]
    # A half times 6 bits is exact in float32: 11 + 6 bits of mantissa.
    scale, minimum = d * scales.astype(np.float32), (dmin * np.float32(-1)) * minimums.astype(np.float32)
    return Quantised(_flat(integers.astype(np.int16)), _flat(scale), _flat(minimum), None)


def read_q4_k(b: Bytes) -> Quantised:
    return _read_super(b, k_nibbles(b[..., 16:]))


def read_q5_k(b: Bytes) -> Quantised:
    return _read_super(b, k_nibbles(b[..., 48:]) | (k_fifth_bits(b[..., 16:48]) << 4))


def read_q6_k(b: Bytes) -> Quantised:
    integers = q6_integers(b).astype(np.int16) - 32
    sixteens = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.int32)
    d = np.repeat(_halves(b[..., 208:210]), 8, axis=-1)
    return Quantised(_flat(integers), d, None, sixteens.reshape(b.shape[0], -1, 2))


READERS = {
    "Q4_0": read_q4_0,
    "Q4_1": read_q4_1,
    "Q5_0": read_q5_0,
    "Q5_1": read_q5_1,
    "Q8_0": read_q8_0,
    "Q4_K": read_q4_k,
    "Q5_K": read_q5_k,
    "Q6_K": read_q6_k,
}


def to_float32(data: Any, format_name: str) -> Floats:
    """Unquantised bytes as float32, exactly."""
    raw = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    if format_name == "F32":
        return raw.view(np.float32)
    if format_name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if format_name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"{format_name} is quantised")


def dequantise_rows(data: Any, format_name: str, rows: int) -> Floats:
    """Rows as float32: scale · integer (+ minimum), each operation rounded once."""
    if format_name not in READERS:
        return to_float32(data, format_name).reshape(rows, -1)
    q = READERS[format_name](as_blocks(data, format_name, rows))
    integers = q.integers.astype(np.float32)
    if q.sixteens is not None:
        scale = q.scale[..., None] * q.sixteens.astype(np.float32)  # exact: 11 + 8 bits
        values = (np.repeat(scale, 16, axis=-1).reshape(integers.shape)) * integers
    else:
        values = q.scale[..., None] * integers
    if q.minimum is not None:
        values = values + q.minimum[..., None]
    return values.reshape(rows, -1)
