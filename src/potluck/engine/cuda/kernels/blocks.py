"""Products with quantised matrices, dequantised on the way: quants, scales and minimums as `matrices.BlockMatrix` lays them out."""

import triton
import triton.language as tl

from potluck.engine.cuda.kernels.products import finish_rows


@triton.jit
def half_of(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scales_of(scales_ptr, supers_ptr, rows, groups, mask, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """Scale and minimum of (rows, groups). KIND 0: plain; 1: affine; 2: super; 3: sixteens. Pairs are loaded as one number."""
    place = rows[:, None] * GROUPS + groups[None, :]
    if KIND == 0:
        scale = tl.load(scales_ptr + place, mask=mask, other=0.0).to(tl.float32)
        minimum = scale
    elif KIND == 1:
        pair = tl.load(scales_ptr.to(tl.pointer_type(tl.uint32)) + place, mask=mask, other=0)
        scale, minimum = half_of(pair & 0xFFFF), half_of(pair >> 16)
    elif KIND == 2:
        wide = rows[:, None] * (GROUPS // 8) + groups[None, :] // 8
        pair = tl.load(scales_ptr.to(tl.pointer_type(tl.uint16)) + place, mask=mask, other=0).to(tl.uint32)
        outer = tl.load(supers_ptr.to(tl.pointer_type(tl.uint32)) + wide, mask=mask, other=0)
        scale = (pair & 0xFF).to(tl.float32) * half_of(outer & 0xFFFF)
        minimum = -(pair >> 8).to(tl.float32) * half_of(outer >> 16)
    else:
        wide = rows[:, None] * (GROUPS // 16) + groups[None, :] // 16
        scale = tl.load(scales_ptr + place, mask=mask, other=0).to(tl.float32)
        scale *= tl.load(supers_ptr + wide, mask=mask, other=0.0).to(tl.float32)
        minimum = scale
    return scale, minimum


@triton.jit
def blocks_times(
    q_ptr, scales_ptr, supers_ptr, x_ptr, rows, groups, m, count, x_stride, total, K: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """total (BN, M) += dequantised (BN, BG · GROUP) times x, in bf16."""
    GROUPS: tl.constexpr = K // GROUP
    is_group = groups < GROUPS
    mask = is_group[None, :]
    scale, minimum = scales_of(scales_ptr, supers_ptr, rows, groups, mask, GROUPS, KIND)
    if BITS == 4:
        j = tl.arange(0, 4)
        words = tl.load(
            q_ptr + rows[:, None, None] * (K // 8) + groups[None, :, None] * 4 + j[None, None, :],
            mask=mask[:, :, None],
            other=0,
        )
        i = tl.arange(0, 8)
        quants = ((words[:, :, None, :] >> (4 * i)[None, None, :, None]) & 15).to(tl.float32) - ZERO
        values = quants * scale[:, :, None, None]
        if KIND == 1 or KIND == 2:
            values += minimum[:, :, None, None]
        w = tl.reshape(values.to(tl.bfloat16), [BN, BG * 32])
    else:
        j = tl.arange(0, GROUP)
        quants = tl.load(
            q_ptr + rows[:, None, None] * K + groups[None, :, None] * GROUP + j[None, None, :],
            mask=mask[:, :, None],
            other=0,
        )
        values = quants.to(tl.float32) * scale[:, :, None]
        if KIND == 1 or KIND == 2:
            values += minimum[:, :, None]
        w = tl.reshape(values.to(tl.bfloat16), [BN, BG * GROUP])
    k = tl.min(groups, axis=0) * GROUP + tl.arange(0, BG * GROUP)
    x = tl.load(x_ptr + m[None, :] * x_stride + k[:, None], mask=(m < count)[None, :] & (k < K)[:, None], other=0.0)
    return tl.dot(w, x.to(tl.bfloat16), total)


@triton.jit
def few_rows_blocks_kernel(
    x_ptr, q_ptr, scales_ptr, supers_ptr, bias_ptr, out_ptr, n_rows, up_offset, count, x_stride, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    is_row = rows < n_rows
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    m = tl.arange(0, M)
    total = tl.zeros([BN, M], tl.float32)
    total_up = tl.zeros([BN, M], tl.float32)
    for first in tl.range(0, K // GROUP, BG, num_stages=STAGES):
        groups = first + tl.arange(0, BG)
        total = blocks_times(
            q_ptr,
            scales_ptr,
            supers_ptr,
            x_ptr,
            safe_rows,
            groups,
            m,
            count,
            x_stride,
            total,
            K,
            GROUP,
            BITS,
            KIND,
            ZERO,
            BN,
            BG,
        )
        if ACTIVATION:
            total_up = blocks_times(
                q_ptr, scales_ptr, supers_ptr, x_ptr, safe_rows + up_offset, groups, m, count, x_stride, total_up, K, GROUP,
                BITS, KIND, ZERO, BN, BG,
            )  # fmt: skip
    finish_rows(total, total_up, bias_ptr, out_ptr, rows, is_row, m, count, out_stride, HAS_BIAS, ADDS, ACTIVATION)


@triton.jit
def dequantise_kernel(
    q_ptr, scales_ptr, supers_ptr, out_ptr, first_row, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, ZERO: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """One row's groups as bf16, for products of many rows, which the matrix library does."""
    GROUPS: tl.constexpr = K // GROUP
    rows = first_row + tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    groups = tl.program_id(1) * BG + tl.arange(0, BG)
    mask = (groups < GROUPS)[None, :]
    scale, minimum = scales_of(scales_ptr, supers_ptr, rows, groups, mask, GROUPS, KIND)
    out = out_ptr + tl.program_id(0).to(tl.int64) * K
    if BITS == 4:
        j = tl.arange(0, 4)
        words = tl.load(
            q_ptr + rows[:, None, None] * (K // 8) + groups[None, :, None] * 4 + j[None, None, :],
            mask=mask[:, :, None],
            other=0,
        )
        for i in tl.static_range(8):
            values = (((words >> (4 * i)) & 15).to(tl.float32) - ZERO) * scale[:, :, None]
            if KIND == 1 or KIND == 2:
                values += minimum[:, :, None]
            k = groups[None, :, None] * 32 + i * 4 + j[None, None, :]
            tl.store(out + k, values.to(tl.bfloat16), mask=mask[:, :, None])
    else:
        j = tl.arange(0, GROUP)
        k = groups[None, :, None] * GROUP + j[None, None, :]
        values = tl.load(q_ptr + rows[:, None, None] * K + k, mask=mask[:, :, None], other=0).to(tl.float32)
        values *= scale[:, :, None]
        if KIND == 1 or KIND == 2:
            values += minimum[:, :, None]
        tl.store(out + k, values.to(tl.bfloat16), mask=mask[:, :, None])
