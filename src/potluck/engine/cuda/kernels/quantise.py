"""A row as 8-bit integers, group by group, for products with a quantised matrix.

K / 4 words of four bytes come first, in the order in which the matrix' words hold its quants; then each group's scale, then each group's
sum, both as float32. A group is as wide as the matrix' groups.
"""

import triton
import triton.language as tl


@triton.jit
def store_packed(
    out_ptr, x, groups, mask, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr
):
    """x: (COUNT, GROUP) of the groups numbered `groups`. 4 bits: byte a of word h · 4 + j is element 8 a + 4 h + j."""
    WORDS: tl.constexpr = GROUP // 4
    largest = tl.max(tl.abs(x), axis=1)
    inverse = tl.where(largest > 0.0, 127.0 / tl.maximum(largest, 1e-30), 0.0)
    rounded = (x * inverse[:, None] + 12582912.0) - 12582912.0  # to the nearest integer
    place = tl.arange(0, 4)
    if BITS == 4:
        quants = tl.reshape(rounded.to(tl.int32), [COUNT, 4, WORDS])
        words = tl.sum((quants & 255) << (8 * place)[None, :, None], axis=1)
    else:
        quants = tl.reshape(rounded.to(tl.int32), [COUNT, WORDS, 4])
        words = tl.sum((quants & 255) << (8 * place)[None, None, :], axis=2)
    w = tl.arange(0, WORDS)
    tl.store(out_ptr + groups[:, None] * WORDS + w[None, :], words, mask=mask[:, None])
    scale = largest / 127.0
    figures = out_ptr + K // 4 + groups
    tl.store(figures, scale.to(tl.int32, bitcast=True), mask=mask)
    tl.store(figures + K // GROUP, (scale * tl.sum(rounded, axis=1)).to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def quantise_kernel(
    x_ptr, norm_ptr, out_ptr, epsilon, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_NORM: tl.constexpr,
    BK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A row, normalised where there is a norm; every program finds the norm for itself and packs COUNT groups."""
    inverse = 1.0
    groups = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    mask = groups < K // GROUP
    k = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + k, mask=mask[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.zeros([BK], tl.float32)
        for first in range(0, K, BK):
            i = first + tl.arange(0, BK)
            each = tl.load(x_ptr + i, mask=i < K, other=0.0).to(tl.float32)
            squares += each * each
        inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + epsilon)
        x = x * inverse * tl.load(norm_ptr + k, mask=mask[:, None], other=0.0)
    store_packed(out_ptr, x, groups, mask, K, BITS, GROUP, COUNT)
