"""A row in the order in which words hold quants: first what every word's lowest quant is multiplied with, then the second, and so on, so
that neighbouring threads read neighbouring values. Divided by what `block_row.byte_of` leaves in its quants.
"""

import triton
import triton.language as tl


@triton.jit
def spread_place(k, K: tl.constexpr, BITS: tl.constexpr):
    """Where element k lies, and what it is multiplied with."""
    WORDS: tl.constexpr = K * BITS // 32
    if BITS == 4:
        i = k % 32 // 4
        place = i * WORDS + k // 32 * 4 + k % 4
    else:
        i = k % 4
        place = i * WORDS + k // 4
    return place, tl.where((BITS == 8) & (i % 2 == 1), 0.00390625, 1.0)


@triton.jit
def spread_kernel(
    x_ptr, norm_ptr, out_ptr, epsilon, K: tl.constexpr, BITS: tl.constexpr, HAS_NORM: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """A row, normalised where there is a norm; every program finds the norm for itself."""
    inverse = 1.0
    if HAS_NORM:
        squares = tl.zeros([BK], tl.float32)
        for first in range(0, K, BK):
            k = first + tl.arange(0, BK)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            squares += x * x
        inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + epsilon)
    k = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = x * inverse * tl.load(norm_ptr + k, mask=k < K, other=0.0)
    place, factor = spread_place(k, K, BITS)
    tl.store(out_ptr + place, x * factor, mask=k < K)
