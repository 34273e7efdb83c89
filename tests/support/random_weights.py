"""Bytes of tensors in every format: random with sane scales, or at the limits of what the format can say."""

from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.weights.checkpoint import BLOCKS

Bytes = npt.NDArray[np.uint8]

FLOAT_FORMATS = ("F32", "F16", "BF16")
QUANTISED_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FORMATS = FLOAT_FORMATS + QUANTISED_FORMATS

# Where a block keeps its halves, and what one unit of them is worth at most (|integer| times any small scale).
_HALVES_AT = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,))
_HALVES_AT |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)) | {"Q6_K": (208,)}
_REACH = {
    "Q4_0": 8,
    "Q4_1": 15,
    "Q5_0": 16,
    "Q5_1": 31,
    "Q8_0": 128,
    "Q4_K": 63 * 15,
    "Q5_K": 63 * 31,
    "Q6_K": 128 * 32,
}

LARGEST_HALF, SMALLEST_HALF, MINUS_ZERO_HALF = 0x7BFF, 0x0001, 0x8000


def row_bytes(format_name: str, columns: int) -> int:
    elements, size = BLOCKS[format_name]
    assert columns % elements == 0
    return columns // elements * size


def random_weights(rng: np.random.Generator, format_name: str, rows: int, columns: int, reach: float = 0.2) -> Bytes:
    """(rows, bytes of a row); values mostly within ±reach."""
    if format_name in FLOAT_FORMATS:
        return float_weights(format_name, (rng.standard_normal((rows, columns)) * reach / 2).astype(np.float32))
    raw = rng.integers(0, 256, (rows, row_bytes(format_name, columns)), dtype=np.uint8)
    sizes = rng.uniform(0.2, 1.0, (2, rows, columns // BLOCKS[format_name][0])) * reach
    signs = rng.choice([-1.0, 1.0], sizes.shape)
    halves = (sizes * signs / _REACH[format_name]).astype(np.float16).view(np.uint16)
    if len(_HALVES_AT[format_name]) == 2:  # minimums that oppose the scale, so that values lie on both sides of zero
        opposite = (-sizes[0] * signs[0] * _minimum_share(format_name)).astype(np.float16).view(np.uint16)
        halves[1] = opposite
    return set_halves(raw, format_name, halves[0], halves[1])


def _minimum_share(format_name: str) -> float:
    # A K format subtracts minimum times 6 bits; the others add the minimum as it stands.
    return -0.5 / 63 if format_name.endswith("_K") else 0.5


def set_halves(raw: Bytes, format_name: str, scale: Any, minimum: Any = None) -> Bytes:
    """`raw` with the halves of every block replaced, given as bits."""
    raw = raw.copy()
    blocks = raw.reshape(len(raw), -1, BLOCKS[format_name][1])
    for at, bits in zip(_HALVES_AT[format_name], (scale, scale if minimum is None else minimum), strict=False):
        bits = np.broadcast_to(np.asarray(bits, np.uint16), blocks.shape[:2])
        blocks[..., at : at + 2] = np.ascontiguousarray(bits).view(np.uint8).reshape(*bits.shape, 2)
    return raw


def filled_weights(format_name: str, rows: int, columns: int, byte: int, half_bits: int | None = None) -> Bytes:
    """Every byte the same, and every half (the format's scales) as given."""
    raw = np.full((rows, row_bytes(format_name, columns)), byte, np.uint8)
    return raw if half_bits is None or format_name in FLOAT_FORMATS else set_halves(raw, format_name, half_bits)


def float_weights(format_name: str, values: npt.NDArray[np.float32]) -> Bytes:
    if format_name == "F32":
        return np.ascontiguousarray(values).view(np.uint8)
    if format_name == "F16":
        return values.astype(np.float16).view(np.uint8)
    return np.ascontiguousarray(values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
