"""Row by row: norms, residual sums, activations, the likeliest token."""

import triton
import triton.language as tl

from potluck.engine.cuda.kernels.products import activated


@triton.jit
def norm_kernel(
    x_ptr, norm_ptr, out_ptr, epsilon, x_stride, out_stride, K: tl.constexpr, ADDS: tl.constexpr, BK: tl.constexpr
):
    """out = norm(x), or out += norm(x)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BK)
    squares = tl.zeros([BK], tl.float32)
    for first in range(0, K, BK):
        k = first + columns
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        squares += x * x
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + epsilon)
    for first in range(0, K, BK):
        k = first + columns
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        y = x * inverse * tl.load(norm_ptr + k, mask=k < K, other=0.0)
        place = out_ptr + row * out_stride + k
        if ADDS:
            y += tl.load(place, mask=k < K, other=0.0)
        tl.store(place, y.to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def transfer_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """A few kilobytes from one memory to another, the host's pinned memory among them."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + k, tl.load(source_ptr + k, mask=k < count), mask=k < count)


@triton.jit
def gate_kernel(x_ptr, out_ptr, K: tl.constexpr, ACTIVATION: tl.constexpr, BK: tl.constexpr):
    """x: (rows, 2 K), gate first; out: (rows, K)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    gate = tl.load(x_ptr + row * 2 * K + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * K + K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + k, (activated(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def largest_kernel(x_ptr, values_ptr, ids_ptr, count, parts, BLOCK: tl.constexpr):
    """The largest of a span of a row's logits and its lowest id; +inf with id -1 where one is not a number."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * count + k, mask=k < count, other=float("-inf"))
    is_bad = tl.max((x != x).to(tl.int32), axis=0) > 0
    largest = tl.max(x, axis=0)
    lowest = tl.min(tl.where(x == largest, k, 2147483647), axis=0)
    tl.store(values_ptr + row * parts + part, tl.where(is_bad, float("inf"), largest))
    tl.store(ids_ptr + row * parts + part, tl.where(is_bad, -1, lowest))


@triton.jit
def likeliest_kernel(values_ptr, ids_ptr, out_ptr, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * parts + k, mask=k < parts, other=float("-inf"))
    ids = tl.load(ids_ptr + row * parts + k, mask=k < parts, other=2147483647)
    largest = tl.max(values, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(values == largest, ids, 2147483647), axis=0))
