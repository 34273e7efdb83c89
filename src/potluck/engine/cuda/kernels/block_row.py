"""One row times a quantised matrix. Layouts are written out: a thread has whole groups of columns of some rows of weights, so that
nothing but the last sum crosses threads. `spread` brings the row into the quants' order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from potluck.engine.cuda.kernels.dense_row import finish_row


@gluon.jit
def as_half(bits):
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def nibble_of(words, low, middle, high, i: gl.constexpr):
    """The i-th quant of each word plus `offset_of(i)`: four bits of a word become the last of a float whose exponent gives them the
    weight one. Masking and setting is one instruction because the exponents are arguments: with two constants it would be two.
    """
    if i < 2:
        words = words << 8
    if i >= 5:
        words = words >> 12
    if i == 0 or i == 2 or i == 5:
        bits = (words & 0xF00) | low
    elif i == 4 or i == 7:
        bits = (words & 0xF0000) | high
    else:
        bits = (words & 0xF000) | middle
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def offset_of(i: gl.constexpr):
    if i == 0 or i == 2 or i == 5:
        return 32768.0
    elif i == 4 or i == 7:
        return 128.0
    else:
        return 2048.0


@gluon.jit
def byte_of(words, low, i: gl.constexpr):
    """The i-th byte of each word, times 256 where `spread` divides the row by it. The words' signs have been turned."""
    PLACE: gl.constexpr = 8 * (i % 2)
    if i >= 2:
        words = words >> 16
    bits = (words & (255 << PLACE)) | low
    return bits.to(gl.float32, bitcast=True) - (8388608.0 + 128 * (1 << PLACE))


@gluon.jit
def scales_at(scales_ptr, supers_ptr, row_groups, row_supers, mask, KIND: gl.constexpr):
    """Scale and minimum. KIND 0: plain; 1: affine; 2: super; 3: sixteens. Pairs are loaded as one number."""
    raw = gl.load(scales_ptr + row_groups, mask=mask, other=0)
    if KIND == 0:
        scale = raw.to(gl.float32)
        minimum = scale
    elif KIND == 1:
        scale = as_half(raw & 0xFFFF)
        minimum = as_half(raw >> 16)
    elif KIND == 2:
        outer = gl.load(supers_ptr + row_supers, mask=mask, other=0)
        pair = raw.to(gl.int32)
        scale = (pair & 0xFF).to(gl.float32) * as_half(outer & 0xFFFF)
        minimum = -((pair >> 8) & 0xFF).to(gl.float32) * as_half(outer >> 16)
    else:
        scale = raw.to(gl.float32) * gl.load(supers_ptr + row_supers, mask=mask, other=0.0).to(gl.float32)
        minimum = scale
    return scale, minimum


@gluon.jit
def words_at(ptr, mask, BITS: gl.constexpr):
    words = gl.load(ptr, mask=mask, other=0, eviction_policy="evict_first")
    if BITS == 8:
        words = words ^ -2139062144  # the sign of each byte
    return words


@gluon.jit
def one_row_blocks_kernel(
    x_ptr, words_ptr, scales_ptr, supers_ptr, bias_ptr, out_ptr, n_rows, up_offset, low, middle, high,
    K: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr, ADDS: gl.constexpr, ACTIVATION: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr,
    SPLIT: gl.constexpr, UNROLL: gl.constexpr, NEXT_K: gl.constexpr, NEXT_BITS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[n] (+)= row n of weights · x; with ACTIVATION, of row n (gate) and row n + up_offset (up).

    ROWS: of a thread. LANES of each of SPLIT warps share a row; UNROLL: groups of a thread in a step.
    """
    PER: gl.constexpr = 32 // BITS
    EACH: gl.constexpr = GROUP // PER
    WORDS: gl.constexpr = K // PER
    GROUPS: gl.constexpr = K // GROUP
    SUPERS: gl.constexpr = K // 256
    IN_SUPER: gl.constexpr = 256 // GROUP
    STEP: gl.constexpr = LANES * SPLIT * UNROLL
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
    place = gl.expand_dims(at * EACH, 1) + gl.expand_dims(j, 0)  # (STEP, EACH)
    row_words = gl.expand_dims(rows * WORDS, 2) + gl.expand_dims(place, 0)
    row_groups = rows * GROUPS + gl.expand_dims(group, 0)
    total = gl.zeros([BN, STEP], gl.float32, plane)
    total_up = gl.zeros([BN, STEP], gl.float32, plane)
    for first in range(0, GROUPS, STEP):
        inside = gl.expand_dims(at < GROUPS - first, 1)
        is_group = gl.expand_dims(group < GROUPS - first, 0)
        supers = rows * SUPERS + gl.expand_dims((first + group) // IN_SUPER, 0)
        words = words_at(words_ptr + first * EACH + row_words, gl.expand_dims(inside, 0), BITS)
        scale, minimum = scales_at(scales_ptr, supers_ptr, row_groups + first, supers, is_group, KIND)
        words_up, scale_up, minimum_up = words, scale, minimum
        if ACTIVATION:
            words_up = words_at(words_ptr + up * WORDS + first * EACH + row_words, gl.expand_dims(inside, 0), BITS)
            scale_up, minimum_up = scales_at(
                scales_ptr, supers_ptr, row_groups + first + up * GROUPS, supers + up * SUPERS, is_group, KIND
            )
        part = gl.zeros([BN, STEP, EACH], gl.float32, cube)
        part_up = gl.zeros([BN, STEP, EACH], gl.float32, cube)
        sums = gl.zeros([STEP, EACH], gl.float32, gl.SliceLayout(0, cube))
        offsets = gl.zeros([STEP, EACH], gl.float32, gl.SliceLayout(0, cube))
        for i in gl.static_range(PER):
            row = gl.load(x_ptr + i * WORDS + first * EACH + place, mask=inside, other=0.0)
            x = gl.expand_dims(row, 0)
            if BITS == 4:
                sums += row
                offsets += row * (offset_of(i) + ZERO)
                part += nibble_of(words, low, middle, high, i) * x
                if ACTIVATION:
                    part_up += nibble_of(words_up, low, middle, high, i) * x
            else:
                sums += row * (1 << (8 * (i % 2)))
                part += byte_of(words, low, i) * x
                if ACTIVATION:
                    part_up += byte_of(words_up, low, i) * x
        if BITS == 4:
            part -= gl.expand_dims(offsets, 0)
            part_up -= gl.expand_dims(offsets, 0)
        total += gl.sum(part, axis=2) * scale
        if ACTIVATION:
            total_up += gl.sum(part_up, axis=2) * scale_up
        if KIND == 1 or KIND == 2:
            of_group = gl.expand_dims(gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(0, plane)), 0)
            total += minimum * of_group
            if ACTIVATION:
                total_up += minimum_up * of_group
    result = gl.sum(total, axis=1)
    up_result = result
    if ACTIVATION:
        up_result = gl.sum(total_up, axis=1)
    finish_row(result, up_result, bias_ptr, out_ptr, n, n_rows, HAS_BIAS, ADDS, ACTIVATION, NEXT_K, NEXT_BITS)
