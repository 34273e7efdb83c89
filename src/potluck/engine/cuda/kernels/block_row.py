"""One row times a quantised matrix. Layouts are written out: each warp has some rows of weights to itself, each lane a group of
columns, so that nothing but the last sum crosses lanes. `spread_kernel` in `blocks` brings the row into the quants' order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def as_half(bits):
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def quant_of(words, i: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr):
    """The i-th quant of each word, times a power of two that `spread_kernel` divides the row by: the bits become the lowest of
    2^23 as a float, from which 2^23 is taken away. That spares a shift and a conversion for each.
    """
    IN_PLACE: gl.constexpr = 5 if BITS == 4 else 2
    PLACE: gl.constexpr = BITS * (i if i < IN_PLACE else i - IN_PLACE)
    BIAS: gl.constexpr = 8388608.0 + (ZERO if BITS == 4 else 128) * (
        1 << PLACE
    )  # signed bytes come with their sign turned
    MASK: gl.constexpr = ((1 << BITS) - 1) << PLACE
    if i >= IN_PLACE:
        words = words >> (BITS * IN_PLACE)
    bits = (words & MASK) | 0x4B000000
    return bits.to(gl.float32, bitcast=True) - BIAS


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
def activated(gate, ACTIVATION: gl.constexpr):
    """1: SiLU; 2: GELU by tanh."""
    if ACTIVATION == 1:
        result = gate / (1.0 + gl.exp(-gate))
    else:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + gl.exp(-inner))
    return result


@gluon.jit
def one_row_blocks_kernel(
    x_ptr, words_ptr, scales_ptr, supers_ptr, bias_ptr, out_ptr, n_rows, up_offset,
    K: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr, ADDS: gl.constexpr, ACTIVATION: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr,
    AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[n] (+)= row n of weights · x; with ACTIVATION, of row n (gate) and row n + up_offset (up). ROWS: of each thread.

    LANES of a warp share a row; AHEAD: the next words are fetched before these are used.
    """
    PER: gl.constexpr = 32 // BITS
    EACH: gl.constexpr = GROUP // PER
    WORDS: gl.constexpr = K // PER
    GROUPS: gl.constexpr = K // GROUP
    SUPERS: gl.constexpr = K // 256
    IN_SUPER: gl.constexpr = 256 // GROUP
    BN: gl.constexpr = ROWS * num_warps * (32 // LANES)
    cube: gl.constexpr = gl.BlockedLayout([ROWS, 1, EACH], [32 // LANES, LANES, 1], [num_warps, 1, 1], [2, 1, 0])
    plane: gl.constexpr = gl.SliceLayout(2, cube)
    n = gl.program_id(0) * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, plane))
    is_row = n < n_rows
    rows = gl.where(is_row, n, 0)
    lanes = gl.arange(0, LANES, layout=gl.SliceLayout(0, plane))
    at = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(0, cube)))
    j = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(0, cube)))
    place = gl.expand_dims(at * EACH, 1) + gl.expand_dims(j, 0)  # (LANES, EACH)
    cube_rows = gl.expand_dims(gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, plane)), 1), 2)
    row_words = cube_rows.to(gl.int64) * WORDS + gl.expand_dims(place, 0)
    row_groups = gl.expand_dims(rows, 1).to(gl.int64) * GROUPS + gl.expand_dims(lanes, 0)
    row_supers = gl.expand_dims(rows, 1).to(gl.int64) * SUPERS
    total = gl.zeros([BN, LANES], gl.float32, plane)
    total_up = gl.zeros([BN, LANES], gl.float32, plane)
    inside = gl.expand_dims(gl.expand_dims(at < GROUPS, 1), 0)
    words = words_at(words_ptr + row_words, inside, BITS)
    words_up = words
    up_words = up_offset.to(gl.int64) * WORDS
    if ACTIVATION:
        words_up = words_at(words_ptr + up_words + row_words, inside, BITS)
    for first in range(0, GROUPS, LANES):
        if not AHEAD:
            inside = gl.expand_dims(gl.expand_dims(at < GROUPS - first, 1), 0)
            words = words_at(words_ptr + first * EACH + row_words, inside, BITS)
            if ACTIVATION:
                words_up = words_at(words_ptr + up_words + first * EACH + row_words, inside, BITS)
        following, following_up = words, words_up
        if AHEAD:
            after = gl.expand_dims(gl.expand_dims(at < GROUPS - first - LANES, 1), 0)
            following = words_at(words_ptr + (first + LANES) * EACH + row_words, after, BITS)
            if ACTIVATION:
                following_up = words_at(words_ptr + up_words + (first + LANES) * EACH + row_words, after, BITS)
        is_group = gl.expand_dims(lanes < GROUPS - first, 0)
        wide = row_supers + gl.expand_dims((first + lanes) // IN_SUPER, 0)
        scale, minimum = scales_at(scales_ptr, supers_ptr, row_groups + first, wide, is_group, KIND)
        scale_up, minimum_up = scale, minimum
        if ACTIVATION:
            up = up_offset.to(gl.int64)
            scale_up, minimum_up = scales_at(
                scales_ptr, supers_ptr, row_groups + first + up * GROUPS, wide + up * SUPERS, is_group, KIND
            )
        part = gl.zeros([BN, LANES, EACH], gl.float32, cube)
        part_up = gl.zeros([BN, LANES, EACH], gl.float32, cube)
        is_inside = gl.expand_dims(at < GROUPS - first, 1)
        for i in gl.static_range(PER):
            x = gl.load(x_ptr + i * WORDS + first * EACH + place, mask=is_inside, other=0.0)
            x = gl.expand_dims(x, 0)
            part += quant_of(words, i, BITS, ZERO) * x
            if ACTIVATION:
                part_up += quant_of(words_up, i, BITS, ZERO) * x
        total += gl.sum(part, axis=2) * scale
        if ACTIVATION:
            total_up += gl.sum(part_up, axis=2) * scale_up
        if KIND == 1 or KIND == 2:
            sums = gl.expand_dims(gl.load(x_ptr + K + first + lanes, mask=lanes < GROUPS - first, other=0.0), 0)
            total += minimum * sums
            if ACTIVATION:
                total_up += minimum_up * sums
        words, words_up = following, following_up
    result = gl.sum(total, axis=1)
    if HAS_BIAS:
        result += gl.load(bias_ptr + n, mask=is_row, other=0.0)
    if ACTIVATION:
        result = activated(result, ACTIVATION) * gl.sum(total_up, axis=1)
    if ADDS:
        result += gl.load(out_ptr + n, mask=is_row, other=0.0)
    gl.store(out_ptr + n, result, mask=is_row)
