"""exp, in plain IEEE float32 operations, once for numba loops and once for lanes: the same steps, hence the same bits.

What follows from it (sigmoid, SiLU, GELU, tanh) stands here too. Every constant is a float32.
"""

from typing import Any

import numpy as np
from numba import njit

from potluck.engine.kernels.lanes import F32, I32, Emitter, Lanes, vector
from potluck.engine.kernels.memory import INLINE, bits_from_float, float_from_bits

LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
LOG2_E = np.float32(1.4426950408889634)
# Adding this makes a float32 round to an integer, to nearest even, and leaves that integer in the low bits.
ROUNDER = np.float32(12582912.0)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
TERMS = tuple(np.float32(1 / factorial) for factorial in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))
ONE, TWO, ZERO = np.float32(1.0), np.float32(2.0), np.float32(0.0)
_T0, _T1, _T2, _T3, _T4, _T5, _T6 = TERMS
GELU_INNER, GELU_CUBIC = np.float32(2 * 0.7978845608028654), np.float32(0.044715)


@njit(inline="always", **INLINE)
def exp(x: Any) -> Any:
    """e**x for x clamped to [-87, 88]; not a number stays not a number."""
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = _T0
    p = p * r + _T1
    p = p * r + _T2
    p = p * r + _T3
    p = p * r + _T4
    p = p * r + _T5
    p = p * r + _T6
    exponent = np.int32((bits_from_float(shifted) + np.int32(127)) << np.int32(23))
    return p * float_from_bits(exponent)


def emit_exp(e: Emitter, x: Lanes) -> Lanes:
    """The same steps as `exp`, on lanes."""
    count = x.count
    constant = lambda value: e.floats(float(value), count)  # noqa: E731 (one name for a splat keeps the formula readable)
    x = x.less(constant(LOWEST)).choose(constant(LOWEST), x)
    x = constant(HIGHEST).less(x).choose(constant(HIGHEST), x)
    shifted = x * constant(LOG2_E) + constant(ROUNDER)
    n = shifted - constant(ROUNDER)
    r = (x - n * constant(LN2_HIGH)) - n * constant(LN2_LOW)
    p = constant(TERMS[0])
    for term in TERMS[1:]:
        p = p * r + constant(term)
    bits = shifted.view(vector(I32, count)) + e.splat_constant(I32, count, 127)
    return p * (bits << e.splat_constant(I32, count, 23)).view(vector(F32, count))


@njit(inline="always", **INLINE)
def silu(x: Any) -> Any:
    return x / (ONE + exp(-x))


@njit(inline="always", **INLINE)
def gelu_tanh(x: Any) -> Any:
    """0.5·x·(1 + tanh(u)) written as x·sigmoid(2u), which does not cancel."""
    inner = GELU_INNER * (x + GELU_CUBIC * ((x * x) * x))
    return x / (ONE + exp(-inner))


@njit(inline="always", **INLINE)
def tanh(x: Any) -> Any:
    return ONE - TWO / (exp(TWO * x) + ONE)
