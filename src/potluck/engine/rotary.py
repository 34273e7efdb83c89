"""Tables of rotary angles: cos and sin by position, from plain float64 operations only, so that every machine has the same bits.

Angles are float32 products of position and frequency, as the models were trained; sine and cosine of that angle are computed
in float64 (argument reduction and Taylor series of our own) and rounded once.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.core.exact_math import log64
from potluck.core.model_facts import Rotary, RotaryScaling

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

_GROW = 1024
# π/2 in three parts of at most 33 bits: a multiple of the first two by an integer below 2**20 is exact in float64.
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10


def exp64(x: Doubles) -> Doubles:
    """e**x in float64 additions and multiplications only."""
    n = np.rint(x * 1.4426950408889634)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    total = np.ones_like(r)
    for k in range(18, 0, -1):
        total = 1.0 + total * (r / k)
    return np.ldexp(total, n.astype(np.int64))


def sin_cos64(x: Doubles) -> tuple[Doubles, Doubles]:
    """For 0 ≤ x < 2**20."""
    n = np.rint(x * (2.0 / math.pi))
    r = ((x - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    square = r * r
    sine = np.ones_like(r)
    cosine = np.ones_like(r)
    for k in range(11, 0, -1):
        sine = 1.0 - sine * (square / ((2 * k) * (2 * k + 1)))
        cosine = 1.0 - cosine * (square / ((2 * k - 1) * (2 * k)))
    sine = sine * r
    quarter = n.astype(np.int64) & 3
    swapped = (quarter & 1) == 1
    sign_sine = np.where(quarter >= 2, -1.0, 1.0)
    sign_cosine = np.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
    return np.where(swapped, cosine, sine) * sign_sine, np.where(swapped, sine, cosine) * sign_cosine


def _llama3(frequencies: Doubles, scaling: RotaryScaling) -> Doubles:
    wavelength = (2.0 * math.pi) / frequencies
    low = scaling.original_context / scaling.low_frequency_factor
    high = scaling.original_context / scaling.high_frequency_factor
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    blended = (1.0 - smooth) * (frequencies / scaling.factor) + smooth * frequencies
    return np.where(wavelength > low, frequencies / scaling.factor, np.where(wavelength < high, frequencies, blended))


def _yarn(frequencies: Doubles, rotary: Rotary, scaling: RotaryScaling) -> Doubles:
    log_base = log64(rotary.base)

    def dimension(rotations: float) -> float:
        ratio = scaling.original_context / (rotations * 2.0 * math.pi)
        return rotary.dimensions * log64(ratio) / (2.0 * log_base)

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), rotary.dimensions - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return (frequencies / scaling.factor) * ramp + frequencies * (1.0 - ramp)


def frequencies_of(rotary: Rotary) -> Floats:
    """One float32 frequency for each rotated pair."""
    exponents = np.arange(0, rotary.dimensions, 2, dtype=np.float64) / rotary.dimensions
    frequencies = exp64(-exponents * log64(rotary.base))
    scaling = rotary.scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "yarn":
        frequencies = _yarn(frequencies, rotary, scaling)
    else:
        frequencies = frequencies / np.asarray(scaling.factors, np.float64)
    return frequencies.astype(np.float32)


class RotaryTable:
    """cos and sin for positions 0 … `length` - 1, grown as sessions get longer."""

    def __init__(self, rotary: Rotary) -> None:
        self._frequencies = frequencies_of(rotary)
        self._magnitude = np.float32(rotary.scaling.magnitude if rotary.scaling is not None else 1.0)
        self.cos: Floats = np.empty((0, len(self._frequencies)), np.float32)
        self.sin: Floats = np.empty((0, len(self._frequencies)), np.float32)

    @property
    def length(self) -> int:
        return len(self.cos)

    def grow(self, length: int) -> bool:
        """Makes sure that `length` positions exist; True where the tables moved."""
        if length <= self.length:
            return False
        wanted = max(-(-length // _GROW) * _GROW, min(2 * self.length, self.length + 16 * _GROW))
        cos, sin = self._rows(np.arange(self.length, wanted, dtype=np.float32))
        self.cos = np.concatenate([self.cos, cos])
        self.sin = np.concatenate([self.sin, sin])
        return True

    def _rows(self, positions: Floats) -> tuple[Any, Any]:
        angles = positions[:, None] * self._frequencies[None, :]
        sine, cosine = sin_cos64(angles.astype(np.float64))
        return cosine.astype(np.float32) * self._magnitude, sine.astype(np.float32) * self._magnitude
