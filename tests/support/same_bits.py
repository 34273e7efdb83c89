"""Equality of floats as bits: -0 is not 0, and nothing is close.

All not-a-numbers count as one, since IEEE leaves their payload open.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_INTEGERS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def different_places(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where two float arrays of the same shape and type differ."""
    integer = _INTEGERS[left.dtype.itemsize]
    differs = np.ascontiguousarray(left).view(integer) != np.ascontiguousarray(right).view(integer)
    return differs & ~(np.isnan(left) & np.isnan(right))


def assert_same_bits(left: npt.NDArray[Any], right: npt.NDArray[Any], what: str = "") -> None:
    assert left.dtype == right.dtype, f"{what}: {left.dtype} and {right.dtype}"
    assert left.shape == right.shape, f"{what}: {left.shape} and {right.shape}"
    differs = different_places(left, right)
    if differs.any():
        place = tuple(int(i) for i in np.argwhere(differs)[0])
        share = f"{int(differs.sum())} of {differs.size} differ"
        raise AssertionError(f"{what}: {share}; at {place}: {left[place]!r} and {right[place]!r}")
