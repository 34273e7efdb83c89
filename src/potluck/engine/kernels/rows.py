"""What happens to each row between the products: norms, residual sums, rounding to int8, activations, rotation.

Rows are independent, so a chunk is a span of rows. Orders are those of docs/arithmetic.md.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from potluck.engine.kernels.functions import ONE, ROUNDER, ZERO, gelu_tanh, silu, tanh
from potluck.engine.kernels.lanes import F32, I8, I32, Emitter, Lanes, vector
from potluck.engine.kernels.memory import (
    BATCH_ROWS,
    INLINE,
    KERNEL,
    KERNEL_OPTIONS,
    float_from_bits,
    floats,
    words,
)

BLOCK = 32
SMALLEST_BITS = int(
    np.float32(1e-30).view(np.int32)
)  # nothing larger in a block: all zeros, as 127 / max must not overflow
LARGEST_BITS = int(
    np.float32(3e38).view(np.int32)
)  # anything larger, or not a number: the block's scale is not a number
ROUNDER_BITS = int(ROUNDER.view(np.int32))

# A buffer of activations: rows as float32 padded to whole blocks, and (where wanted) their int8 form.
# The words of its description are: float rows, q, d, s, sums, columns, padded columns, whether int8 is wanted.
ROWS_FLOAT, ROWS_Q, ROWS_D, ROWS_S, ROWS_SUMS, ROWS_COLUMNS, ROWS_PADDED, ROWS_QUANTISED = range(8)
ROWS_WORDS = 8


@njit(**INLINE)
def span(total: int, chunk: int, chunks: int) -> Any:
    return total * chunk // chunks, total * (chunk + 1) // chunks


def _emit_quantise(e: Emitter, x: ir.Value, q: ir.Value, d: ir.Value, s: ir.Value, sums: ir.Value) -> None:
    halves = [e.load(vector(F32, 16), x, 64 * i) for i in range(2)]
    magnitudes = [half.view(vector(I32, 16)) & e.splat_constant(I32, 16, 0x7FFFFFFF) for half in halves]
    # As integers, magnitudes compare as they do as floats, and not-a-number is the largest of all.
    larger = Lanes(e, e.builder.icmp_signed(">", magnitudes[0].value, magnitudes[1].value)).choose(*magnitudes)
    bits = e.call("llvm.vector.reduce.smax.v16i32", I32, [larger.value])
    largest = e.builder.bitcast(bits, F32)
    is_usable = e.builder.and_(
        e.builder.icmp_signed(">", bits, I32(SMALLEST_BITS)), e.builder.icmp_signed("<", bits, I32(LARGEST_BITS))
    )
    zero, limit = ir.Constant(F32, 0.0), ir.Constant(F32, 127.0)
    inverse = e.spread(e.builder.select(is_usable, e.builder.fdiv(limit, largest), zero), 16)
    scale = e.builder.fdiv(largest, limit)
    is_small = e.builder.icmp_signed("<=", bits, I32(SMALLEST_BITS))
    otherwise = e.builder.select(is_small, zero, ir.Constant(F32, float("nan")))
    scale = e.builder.select(is_usable, scale, otherwise)
    totals = [_emit_sixteen(e, half, inverse, is_usable, e.add(q, 16 * i)) for i, half in enumerate(halves)]
    for i, total in enumerate(totals):
        e.store(Lanes(e, total), sums, 4 * i)
    e.store(Lanes(e, scale), d)
    total_float = e.builder.sitofp(e.builder.add(*totals), F32)
    e.store(Lanes(e, e.builder.fmul(scale, total_float)), s)


def _emit_sixteen(e: Emitter, x: Lanes, inverse: Lanes, is_usable: ir.Value, q: ir.Value) -> ir.Value:
    """Rounds 16 floats to int8, to nearest even, by adding a number that leaves no room for a fraction."""
    rounded = (x * inverse + e.floats(float(ROUNDER), 16)).view(vector(I32, 16))
    whole = rounded - e.splat_constant(I32, 16, ROUNDER_BITS)
    whole = Lanes(e, e.builder.select(is_usable, whole.value, e.splat_constant(I32, 16, 0).value))
    e.store(Lanes(e, e.builder.trunc(whole.value, vector(I8, 16))), q)
    return e.call("llvm.vector.reduce.add.v16i32", I32, [whole.value])


@intrinsic
def quantise_block(typing: Any, x: Any, q: Any, d: Any, s: Any, sums: Any) -> Any:
    """32 floats to int8: scale = max|x| / 127; stores scale, scale · sum, and the sums of both sixteens. Addresses."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        _emit_quantise(Emitter(builder), *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@njit(**INLINE)
def quantise_row(buffer: Any, row: int) -> None:
    padded = buffer[ROWS_PADDED]
    blocks = padded // BLOCK
    x = buffer[ROWS_FLOAT] + row * padded * 4
    q = buffer[ROWS_Q] + row * padded
    d = buffer[ROWS_D] + row * blocks * 4
    s = buffer[ROWS_S] + row * blocks * 4
    sums = buffer[ROWS_SUMS] + row * blocks * 8
    for block in range(blocks):
        quantise_block(x + block * 128, q + block * 32, d + block * 4, s + block * 4, sums + block * 8)


@njit(**INLINE)
def inverse_root_mean_square(x: Any, count: int, epsilon: Any) -> Any:
    """Squares summed in eight lanes (column modulo 8), the lanes in a tree: no wider processor can change that."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = ZERO
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        s0 += x[i] * x[i]
        s1 += x[i + 1] * x[i + 1]
        s2 += x[i + 2] * x[i + 2]
        s3 += x[i + 3] * x[i + 3]
        s4 += x[i + 4] * x[i + 4]
        s5 += x[i + 5] * x[i + 5]
        s6 += x[i + 6] * x[i + 6]
        s7 += x[i + 7] * x[i + 7]
    total = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
    for i in range(whole, count):
        total += x[i] * x[i]
    return ONE / np.float32(np.sqrt(total / np.float32(count) + epsilon))


@njit(**INLINE)
def normalise(x: Any, weight: Any, count: int, epsilon: Any, output: Any) -> None:
    r = inverse_root_mean_square(x, count, epsilon)
    for i in range(count):
        output[i] = (x[i] * r) * weight[i]


# Arguments of `residual_norm`: hidden rows, what to add (0: nothing), its row stride, post-norm weights (0: none), scratch rows,
# norm weights (0: add only), epsilon's bits, columns, address of the target buffer's description, bias of the addend (0: none).
HIDDEN, ADDEND, ADDEND_STRIDE, POST_NORM, SCRATCH, NORM, EPSILON, COLUMNS, TARGET, BIAS = range(10)
RESIDUAL_WORDS = 10


def residual_norm_kernel() -> Any:
    """hidden += [norm of] addend; then target = norm(hidden), in int8 too where the target wants it."""

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def residual_norm(arguments, batch, chunk, chunks):
        a = words(arguments, RESIDUAL_WORDS)
        columns = a[COLUMNS]
        epsilon = float_from_bits(np.int32(a[EPSILON]))
        begin, end = span(words(batch, 1)[BATCH_ROWS], chunk, chunks)
        for row in range(begin, end):
            hidden = floats(a[HIDDEN] + row * columns * 4, columns)
            if a[ADDEND] != 0:
                addend = floats(a[ADDEND] + row * a[ADDEND_STRIDE] * 4, columns)
                if a[BIAS] != 0:
                    bias = floats(a[BIAS], columns)
                    for i in range(columns):
                        addend[i] = addend[i] + bias[i]
                if a[POST_NORM] != 0:
                    scratch = floats(a[SCRATCH] + row * columns * 4, columns)
                    normalise(addend, floats(a[POST_NORM], columns), columns, epsilon, scratch)
                    addend = scratch
                for i in range(columns):
                    hidden[i] = hidden[i] + addend[i]
            if a[NORM] != 0:
                target = words(a[TARGET], ROWS_WORDS)
                output = floats(target[ROWS_FLOAT] + row * target[ROWS_PADDED] * 4, columns)
                normalise(hidden, floats(a[NORM], columns), columns, epsilon, output)
                if target[ROWS_QUANTISED] != 0:
                    quantise_row(target, row)

    return residual_norm


# Arguments of `activate`: gate rows, up rows, their stride, columns, which function, target buffer.
GATE, UP, STRIDE, ACTIVATE_COLUMNS, FUNCTION, ACTIVATE_TARGET = range(6)
ACTIVATE_WORDS = 6


def activate_kernel() -> Any:
    """target = f(gate) · up. Chunks are spans of rows."""

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def activate(arguments, batch, chunk, chunks):
        a = words(arguments, ACTIVATE_WORDS)
        columns = a[ACTIVATE_COLUMNS]
        target = words(a[ACTIVATE_TARGET], ROWS_WORDS)
        begin, end = span(words(batch, 1)[BATCH_ROWS], chunk, chunks)
        for row in range(begin, end):
            gate = floats(a[GATE] + row * a[STRIDE] * 4, columns)
            up = floats(a[UP] + row * a[STRIDE] * 4, columns)
            output = floats(target[ROWS_FLOAT] + row * target[ROWS_PADDED] * 4, columns)
            if a[FUNCTION] == 0:
                for i in range(columns):
                    output[i] = silu(gate[i]) * up[i]
            else:
                for i in range(columns):
                    output[i] = gelu_tanh(gate[i]) * up[i]
            if target[ROWS_QUANTISED] != 0:
                quantise_row(target, row)

    return activate


# Arguments of `soft_cap`: rows, columns, stride, cap's bits.
def soft_cap_kernel() -> Any:
    """x = cap · tanh(x / cap), in place."""

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def soft_cap(arguments, batch, chunk, chunks):
        a = words(arguments, 4)
        cap = float_from_bits(np.int32(a[3]))
        begin, end = span(words(batch, 1)[BATCH_ROWS], chunk, chunks)
        for row in range(begin, end):
            x = floats(a[0] + row * a[2] * 4, a[1])
            for i in range(a[1]):
                x[i] = cap * tanh(x[i] / cap)

    return soft_cap
