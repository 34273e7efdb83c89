"""Products of several rows with float matrices: tiles of weights meet the rows in the tensor cores, columns in one order whatever the
number of rows is.
"""

import triton
import triton.language as tl


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """1: SiLU; 2: GELU by tanh."""
    if ACTIVATION == 1:
        result = gate / (1.0 + tl.exp(-gate))
    else:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-inner))
    return result


@triton.jit
def few_rows_kernel(
    x_ptr, squares_ptr, w_ptr, bias_ptr, out_ptr, parts_ptr, tickets_ptr, next_norm_ptr, next_ptr, next_squares_ptr, n_rows,
    up_offset, count, pieces, x_stride, out_stride, epsilon,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, ACTIVATION: tl.constexpr, KIND: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PIECES: tl.constexpr,
    READIES: tl.constexpr,
):  # fmt: skip
    """KIND 0: bf16 weights; 1: fp16, as two bf16 each; 2: float32.

    SPLITS programs share a tile's columns; the last to finish sums their parts, in order. PIECES: rows of x are not normalised yet and
    their squares come in this many pieces at most. READIES: the result is left for the next norm in the same form.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    rows = block * BN + tl.arange(0, BN)
    is_row = rows < n_rows
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    m = tl.arange(0, M)
    columns = tl.arange(0, BK)
    SHARE: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    start = split * SHARE
    # What the end needs is asked for before the columns, and used after them: nobody waits for it.
    places = out_ptr + m[None, :] * out_stride + rows[:, None]
    is_wanted = is_row[:, None] & (m < count)[None, :]
    before = tl.zeros([BN, M], tl.float32)
    if ADDS:
        before = tl.load(places, mask=is_wanted, other=0.0).to(tl.float32)
    bias = tl.zeros([BN], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=is_row, other=0.0)
    next_norm = tl.zeros([BN], tl.float32)
    if READIES:
        next_norm = tl.load(next_norm_ptr + rows, mask=is_row, other=0.0)
    squares = tl.zeros([1, M], tl.float32)
    if PIECES:
        piece = tl.arange(0, PIECES)
        squares = tl.load(squares_ptr + piece[:, None] * M + m[None, :], mask=(piece < pieces)[:, None], other=0.0)
    total = tl.zeros([BN, M], tl.float32)
    total_up = tl.zeros([BN, M], tl.float32)
    for first in tl.range(0, SHARE, BK, num_stages=STAGES):
        k = start + first + columns
        x = tl.load(x_ptr + m[None, :] * x_stride + k[:, None], mask=(m < count)[None, :] & (k < K)[:, None], other=0.0)
        w_ptrs = w_ptr + safe_rows[:, None] * K + k[None, :]
        if K % (SPLITS * BK) == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(k < K)[None, :], other=0.0)
        total = times(w, x, total, KIND)
        if ACTIVATION:
            if K % (SPLITS * BK) == 0:
                u = tl.load(w_ptrs + up_offset.to(tl.int64) * K)
            else:
                u = tl.load(w_ptrs + up_offset.to(tl.int64) * K, mask=(k < K)[None, :], other=0.0)
            total_up = times(u, x, total_up, KIND)
    is_last = True
    if SPLITS > 1:
        tl.static_assert(not ACTIVATION)
        place = parts_ptr + block * SPLITS * BN * M + tl.arange(0, BN)[:, None] * M + m[None, :]
        tl.store(place + split * BN * M, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(tickets_ptr + block, 1) == SPLITS - 1
        if is_last:
            tl.store(tickets_ptr + block, 0)
            total = tl.load(place)
            for i in tl.static_range(1, SPLITS):
                total += tl.load(place + i * BN * M)
    if is_last:
        if PIECES:
            inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + epsilon)
            total *= inverse[None, :]
            total_up *= inverse[None, :]
        total += bias[:, None] + before
        if ACTIVATION:
            total = activated(total, ACTIVATION) * total_up
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=is_wanted)
        if READIES:
            next_places = next_ptr + m[None, :] * n_rows + rows[:, None]
            tl.store(next_places, (total * next_norm[:, None]).to(next_ptr.dtype.element_ty), mask=is_wanted)
            next_squares = tl.sum(tl.where(is_wanted, total * total, 0.0), axis=0)
            tl.store(next_squares_ptr + block * M + m, next_squares)


@triton.jit
def times(w, x, total, KIND: tl.constexpr):
    if KIND == 0:
        total = tl.dot(w, x.to(tl.bfloat16), total)
    elif KIND == 1:
        wide = w.to(tl.float32)
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        rows = x.to(tl.bfloat16)
        total = tl.dot(high, rows, tl.dot(low, rows, total))
    else:
        total = tl.dot(w, x.to(tl.float32), total, input_precision="ieee")
    return total


@triton.jit
def finish_rows(
    total, total_up, bias_ptr, out_ptr, rows, is_row, m, count, out_stride, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Bias, activation, sum with what is there, and out."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0)[:, None]
    if ACTIVATION:
        total = activated(total, ACTIVATION) * total_up
    places = out_ptr + m[None, :] * out_stride + rows[:, None]
    is_wanted = is_row[:, None] & (m < count)[None, :]
    if ADDS:
        total += tl.load(places, mask=is_wanted, other=0.0)
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=is_wanted)
