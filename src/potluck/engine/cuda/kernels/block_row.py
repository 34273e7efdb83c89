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
def quant_of(words, magic, i: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr):
    """The i-th quant of each word, times a power of two that `spread_kernel` divides the row by: the bits become the lowest of
    2^23 as a float (`magic`), from which 2^23 is taken away. That spares a shift and a conversion for each. `magic` is an
    argument, because with two constants the compiler makes two instructions of masking and setting.
    """
    IN_PLACE: gl.constexpr = 5 if BITS == 4 else 2
    PLACE: gl.constexpr = BITS * (i if i < IN_PLACE else i - IN_PLACE)
    BIAS: gl.constexpr = 8388608.0 + (ZERO if BITS == 4 else 128) * (
        1 << PLACE
    )  # signed bytes come with their sign turned
    MASK: gl.constexpr = ((1 << BITS) - 1) << PLACE
    if i >= IN_PLACE:
        words = words >> (BITS * IN_PLACE)
    bits = (words & MASK) | magic
    return bits.to(gl.float32, bitcast=True) - BIAS


@gluon.jit
def scales_of(raw, outer, KIND: gl.constexpr):
    """Scale and minimum. KIND 0: plain; 1: affine; 2: super; 3: sixteens. Pairs are one number."""
    if KIND == 0:
        scale = raw.to(gl.float32)
        minimum = scale
    elif KIND == 1:
        scale = as_half(raw & 0xFFFF)
        minimum = as_half(raw >> 16)
    elif KIND == 2:
        pair = raw.to(gl.int32)
        scale = (pair & 0xFF).to(gl.float32) * as_half(outer & 0xFFFF)
        minimum = -((pair >> 8) & 0xFF).to(gl.float32) * as_half(outer >> 16)
    else:
        scale = raw.to(gl.float32) * outer.to(gl.float32)
        minimum = scale
    return scale, minimum


@gluon.jit
def fetched(
    words_ptr, scales_ptr, supers_ptr, words, groups, supers, place, group, left, KIND: gl.constexpr
):  # fmt: skip
    """What a step needs of some rows, as it lies there; nothing past `left` groups. Nobody waits for it here."""
    inside = gl.expand_dims(place < left, 1)
    raw_words = gl.load(words_ptr + words, mask=gl.expand_dims(inside, 0), other=0, eviction_policy="evict_first")
    mask = gl.expand_dims(group < left, 0)
    raw = gl.load(scales_ptr + groups, mask=mask, other=0)
    outer = raw
    if KIND >= 2:
        outer = gl.load(supers_ptr + supers, mask=mask, other=0)
    return raw_words, raw, outer


@gluon.jit
def unsigned(words, BITS: gl.constexpr):
    if BITS == 8:
        words = words ^ -2139062144  # the sign of each byte
    return words


@gluon.jit
def one_row_blocks_kernel(
    x_ptr, words_ptr, scales_ptr, supers_ptr, bias_ptr, out_ptr, n_rows, up_offset, magic,
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
    IN_PLACE: gl.constexpr = 5 if BITS == 4 else 2
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
    row_supers = rows * SUPERS
    following = fetched(
        words_ptr, scales_ptr, supers_ptr, row_words, row_groups, row_supers + gl.expand_dims(group // IN_SUPER, 0), at, group,
        GROUPS, KIND,
    )  # fmt: skip
    following_up = following
    if ACTIVATION:
        following_up = fetched(
            words_ptr + up * WORDS, scales_ptr + up * GROUPS, supers_ptr + up * SUPERS, row_words, row_groups,
            row_supers + gl.expand_dims(group // IN_SUPER, 0), at, group, GROUPS, KIND,
        )  # fmt: skip
    for first in range(0, GROUPS, STEP):
        inside = gl.expand_dims(at < GROUPS - first, 1)
        words, raw, outer = following
        words_up, raw_up, outer_up = following_up
        ahead = first + STEP
        supers = row_supers + gl.expand_dims((ahead + group) // IN_SUPER, 0)
        following = fetched(
            words_ptr + ahead * EACH, scales_ptr + ahead, supers_ptr, row_words, row_groups, supers, at, group, GROUPS - ahead,
            KIND,
        )  # fmt: skip
        if ACTIVATION:
            following_up = fetched(
                words_ptr + up * WORDS + ahead * EACH, scales_ptr + up * GROUPS + ahead, supers_ptr + up * SUPERS, row_words,
                row_groups, supers, at, group, GROUPS - ahead, KIND,
            )  # fmt: skip
        words, words_up = unsigned(words, BITS), unsigned(words_up, BITS)
        part = gl.zeros([BN, STEP, EACH], gl.float32, cube)
        part_up = gl.zeros([BN, STEP, EACH], gl.float32, cube)
        sums = gl.zeros([STEP, EACH], gl.float32, gl.SliceLayout(0, cube))
        for i in gl.static_range(PER):
            row = gl.load(x_ptr + i * WORDS + first * EACH + place, mask=inside, other=0.0)
            sums += row * (1 << (BITS * (i if i < IN_PLACE else i - IN_PLACE)))
            x = gl.expand_dims(row, 0)
            part += quant_of(words, magic, i, BITS, ZERO) * x
            if ACTIVATION:
                part_up += quant_of(words_up, magic, i, BITS, ZERO) * x
        scale, minimum = scales_of(raw, outer, KIND)
        total += gl.sum(part, axis=2) * scale
        if ACTIVATION:
            scale_up, minimum_up = scales_of(raw_up, outer_up, KIND)
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
