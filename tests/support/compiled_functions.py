"""The kernels' scalar and lane functions as calls on whole arrays, compiled for tests."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from potluck.engine.kernels import functions, rows
from potluck.engine.kernels.lanes import F32, I16, Emitter, vector
from potluck.engine.kernels.processor import PROCESSORS

Floats = npt.NDArray[np.float32]


@intrinsic
def _exp_of_sixteen(typing: Any, source: Any, target: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        e = Emitter(builder)
        e.store(functions.emit_exp(e, e.load(vector(F32, 16), values[0])), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(cache=True, error_model="numpy")
def _exp_in_lanes(source: int, target: int, count: int) -> None:
    for i in range(0, count, 16):
        _exp_of_sixteen(source + 4 * i, target + 4 * i)


def exp_in_lanes(x: Floats) -> Floats:
    padded = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    result = np.empty_like(padded)
    _exp_in_lanes(padded.ctypes.data, result.ctypes.data, len(padded))
    return result[: len(x)]


@njit(cache=True, error_model="numpy")
def _exp(x: Floats, result: Floats) -> None:
    for i in range(len(x)):
        result[i] = functions.exp(x[i])


@njit(cache=True, error_model="numpy")
def _silu(x: Floats, result: Floats) -> None:
    for i in range(len(x)):
        result[i] = functions.silu(x[i])


@njit(cache=True, error_model="numpy")
def _gelu_tanh(x: Floats, result: Floats) -> None:
    for i in range(len(x)):
        result[i] = functions.gelu_tanh(x[i])


@njit(cache=True, error_model="numpy")
def _tanh(x: Floats, result: Floats) -> None:
    for i in range(len(x)):
        result[i] = functions.tanh(x[i])


def _elementwise(function: Any) -> Callable[[Floats], Floats]:
    def apply(x: Floats) -> Floats:
        result = np.empty_like(x)
        function(x, result)
        return result

    return apply


COMPILED = {name: _elementwise(f) for name, f in (("silu", _silu), ("gelu_tanh", _gelu_tanh), ("tanh", _tanh))}
exp_in_loops = _elementwise(_exp)


@njit(cache=True, error_model="numpy")
def _normalise(x: Floats, weight: Floats, epsilon: Any, result: Floats) -> None:
    for row in range(len(x)):
        rows.normalise(x[row], weight, x.shape[1], epsilon, result[row])


def normalise(x: Floats, weight: Floats, epsilon: float) -> Floats:
    result = np.empty_like(x)
    _normalise(x, weight, np.float32(epsilon), result)
    return result


@cache
def half_conversions(processor: str) -> tuple[Any, Any]:
    """(float → half bits, half bits → float) of one kind of processor, on arrays whose length is a multiple of 16."""
    chosen = PROCESSORS[processor]

    @intrinsic
    def sixteen_to_half(typing: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            e = Emitter(builder)
            e.store(chosen.float_to_half(e, e.load(vector(F32, 16), values[0])), values[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @intrinsic
    def sixteen_to_float(typing: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            e = Emitter(builder)
            e.store(chosen.half_to_float(e, e.load(vector(I16, 16), values[0])), values[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def to_half(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            sixteen_to_half(source + 4 * i, target + 2 * i)

    @njit
    def to_float(source: int, target: int, count: int) -> None:
        for i in range(0, count, 16):
            sixteen_to_float(source + 2 * i, target + 4 * i)

    def halves_of(x: Floats) -> npt.NDArray[np.float16]:
        assert len(x) % 16 == 0
        result = np.empty(len(x), np.float16)
        to_half(x.ctypes.data, result.ctypes.data, len(x))
        return result

    def floats_of(x: npt.NDArray[np.float16]) -> Floats:
        assert len(x) % 16 == 0
        result = np.empty(len(x), np.float32)
        to_float(x.ctypes.data, result.ctypes.data, len(x))
        return result

    return halves_of, floats_of
