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
    x_ptr, w_ptr, bias_ptr, out_ptr, n_rows, up_offset, count, x_stride, out_stride,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, ACTIVATION: tl.constexpr, KIND: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """KIND 0: bf16 weights; 1: fp16, as two bf16 each; 2: float32."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = rows < n_rows
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    m = tl.arange(0, M)
    columns = tl.arange(0, BK)
    total = tl.zeros([BN, M], tl.float32)
    total_up = tl.zeros([BN, M], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        k = first + columns
        x = tl.load(x_ptr + m[None, :] * x_stride + k[:, None], mask=(m < count)[None, :] & (k < K)[:, None], other=0.0)
        w_ptrs = w_ptr + safe_rows[:, None] * K + k[None, :]
        if K % BK == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(k < K)[None, :], other=0.0)
        total = times(w, x, total, KIND)
        if ACTIVATION:
            if K % BK == 0:
                u = tl.load(w_ptrs + up_offset.to(tl.int64) * K)
            else:
                u = tl.load(w_ptrs + up_offset.to(tl.int64) * K, mask=(k < K)[None, :], other=0.0)
            total_up = times(u, x, total_up, KIND)
    finish_rows(
        total, total_up, bias_ptr, out_ptr, rows, is_row, m, count, out_stride, HAS_BIAS, ADDS, ACTIVATION
    )  # fmt: skip


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
