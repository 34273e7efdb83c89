"""One row of 8-bit integers times a quantised matrix, four products to an instruction. Layouts are written out: a thread has whole groups
of columns of some rows of weights, so that nothing but the last sum crosses threads. `quantise` makes the row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from potluck.engine.cuda.kernels.dense_row import finish_row


@gluon.jit
def as_half(bits):
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def dot_of_bytes(a, b, total):
    """Four signed bytes of each word, multiplied and summed onto `total`."""
    return gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def scales_at(scales_ptr, supers_ptr, row_groups, row_supers, mask, KIND: gl.constexpr, IS_EVEN: gl.constexpr):
    """Scale and minimum. KIND 0: plain; 1: affine; 2: super; 3: sixteens. Pairs are loaded as one number."""
    raw = loaded(scales_ptr + row_groups, mask, IS_EVEN)
    if KIND == 0:
        scale = raw.to(gl.float32)
        minimum = scale
    elif KIND == 1:
        scale = as_half(raw & 0xFFFF)
        minimum = as_half(raw >> 16)
    elif KIND == 2:
        outer = loaded(supers_ptr + row_supers, mask, IS_EVEN)
        pair = raw.to(gl.int32)
        scale = (pair & 0xFF).to(gl.float32) * as_half(outer & 0xFFFF)
        minimum = -((pair >> 8) & 0xFF).to(gl.float32) * as_half(outer >> 16)
    else:
        scale = raw.to(gl.float32) * loaded(supers_ptr + row_supers, mask, IS_EVEN).to(gl.float32)
        minimum = scale
    return scale, minimum


@gluon.jit
def loaded(ptr, mask, IS_EVEN: gl.constexpr):
    if IS_EVEN:
        values = gl.load(ptr)
    else:
        values = gl.load(ptr, mask=mask, other=0)
    return values


@gluon.jit
def words_at(ptr, mask, IS_EVEN: gl.constexpr):
    if IS_EVEN:
        words = gl.load(ptr, eviction_policy="evict_first")
    else:
        words = gl.load(ptr, mask=mask, other=0, eviction_policy="evict_first")
    return words


@gluon.jit
def group_sums(words, low, high, BITS: gl.constexpr):
    """Integers: quants times the row, summed over each group. 4 bits: a word's even quants meet `low`, its odd ones `high`."""
    part = gl.full(words.shape, 0, gl.int32, words.type.layout)
    if BITS == 4:
        part = dot_of_bytes(words & 0x0F0F0F0F, low, part)
        part = dot_of_bytes((words >> 4) & 0x0F0F0F0F, high, part)
    else:
        part = dot_of_bytes(words, low, part)
    return gl.sum(part, axis=2)


@gluon.jit
def one_row_blocks_kernel(
    x_ptr, words_ptr, scales_ptr, supers_ptr, bias_ptr, out_ptr, n_rows, up_offset,
    K: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr, ADDS: gl.constexpr, ACTIVATION: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr,
    SPLIT: gl.constexpr, UNROLL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[n] (+)= row n of weights · x; with ACTIVATION, of row n (gate) and row n + up_offset (up).

    x: as `quantise` lays it out. ROWS: of a thread. LANES of each of SPLIT warps share a row; UNROLL: groups of a thread in a step.
    """
    EACH: gl.constexpr = GROUP * BITS // 32  # words of a group
    WORDS: gl.constexpr = K * BITS // 32
    GROUPS: gl.constexpr = K // GROUP
    GROUP_BYTES: gl.constexpr = GROUP // 4  # words of the row for a group
    SUPERS: gl.constexpr = K // 256
    IN_SUPER: gl.constexpr = 256 // GROUP
    STEP: gl.constexpr = LANES * SPLIT * UNROLL
    IS_EVEN: gl.constexpr = GROUPS % STEP == 0
    BN: gl.constexpr = ROWS * (num_warps // SPLIT) * (32 // LANES)
    cube: gl.constexpr = gl.BlockedLayout(
        [ROWS, 1, EACH], [32 // LANES, LANES, 1], [num_warps // SPLIT, SPLIT, 1], [2, 1, 0]
    )
    plane: gl.constexpr = gl.SliceLayout(2, cube)
    n = gl.program_id(0) * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, plane))
    rows = gl.expand_dims(gl.where(n < n_rows, n, 0).to(gl.int64), 1)
    up = up_offset.to(gl.int64)
    group = gl.arange(0, STEP, layout=gl.SliceLayout(0, plane))
    at = gl.arange(0, STEP, layout=gl.SliceLayout(1, gl.SliceLayout(0, cube)))
    j = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(0, cube)))
    row_words = gl.expand_dims(rows * WORDS, 2) + gl.expand_dims(gl.expand_dims(at * EACH, 1) + gl.expand_dims(j, 0), 0)
    x_words = gl.expand_dims(at * GROUP_BYTES, 1) + gl.expand_dims(j, 0)  # (STEP, EACH)
    row_groups = rows * GROUPS + gl.expand_dims(group, 0)
    total = gl.zeros([BN, STEP], gl.float32, plane)
    total_up = gl.zeros([BN, STEP], gl.float32, plane)
    for first in range(0, GROUPS, STEP):
        inside = gl.expand_dims(at < GROUPS - first, 1)
        is_group = gl.expand_dims(group < GROUPS - first, 0)
        supers = rows * SUPERS + gl.expand_dims((first + group) // IN_SUPER, 0)
        words = words_at(words_ptr + first * EACH + row_words, gl.expand_dims(inside, 0), IS_EVEN)
        scale, minimum = scales_at(scales_ptr, supers_ptr, row_groups + first, supers, is_group, KIND, IS_EVEN)
        words_up, scale_up, minimum_up = words, scale, minimum
        if ACTIVATION:
            words_up = words_at(words_ptr + up * WORDS + first * EACH + row_words, gl.expand_dims(inside, 0), IS_EVEN)
            scale_up, minimum_up = scales_at(
                scales_ptr, supers_ptr, row_groups + first + up * GROUPS, supers + up * SUPERS, is_group, KIND, IS_EVEN
            )
        low = gl.expand_dims(loaded(x_ptr + first * GROUP_BYTES + x_words, inside, IS_EVEN), 0)
        high = low
        if BITS == 4:
            high = gl.expand_dims(loaded(x_ptr + first * GROUP_BYTES + EACH + x_words, inside, IS_EVEN), 0)
        figures = x_ptr + K // 4 + first + gl.expand_dims(group, 0)
        x_scale = loaded(figures, is_group, IS_EVEN).to(gl.float32, bitcast=True)
        x_sum = loaded(figures + GROUPS, is_group, IS_EVEN).to(gl.float32, bitcast=True)
        total += (group_sums(words, low, high, BITS).to(gl.float32) * x_scale - ZERO * x_sum) * scale
        if ACTIVATION:
            total_up += (group_sums(words_up, low, high, BITS).to(gl.float32) * x_scale - ZERO * x_sum) * scale_up
        if KIND == 1 or KIND == 2:
            total += minimum * x_sum
            if ACTIVATION:
                total_up += minimum_up * x_sum
    result = gl.sum(total, axis=1)
    up_result = result
    if ACTIVATION:
        up_result = gl.sum(total_up, axis=1)
    finish_row(result, up_result, bias_ptr, out_ptr, n, n_rows, HAS_BIAS, ADDS, ACTIVATION)
