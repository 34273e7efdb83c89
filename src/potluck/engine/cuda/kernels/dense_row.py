"""One row times a matrix of floats, summed in float32. Layouts are written out: a thread has whole runs of 16 bytes of some rows of
weights, so that nothing but the last sum crosses threads, and everything that a step needs is on its way before any of it is used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def finish_row(
    result, up, bias_ptr, out_ptr, n, n_rows, HAS_BIAS: gl.constexpr, ADDS: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Bias, activation, sum with what is there, and out."""
    is_row = n < n_rows
    if HAS_BIAS:
        result += gl.load(bias_ptr + n, mask=is_row, other=0.0)
    if ACTIVATION:
        result = activated(result, ACTIVATION) * up
    if ADDS:
        result += gl.load(out_ptr + n, mask=is_row, other=0.0)
    gl.store(out_ptr + n, result, mask=is_row)


@gluon.jit
def weights_at(ptr, mask, IS_EVEN: gl.constexpr):
    if IS_EVEN:
        weights = gl.load(ptr, eviction_policy="evict_first")
    else:
        weights = gl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    return weights


@gluon.jit
def one_row_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, out_ptr, n_rows, up_offset, epsilon,
    K: gl.constexpr, EACH: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, ADDS: gl.constexpr,
    ACTIVATION: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr, SPLIT: gl.constexpr, UNROLL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[n] (+)= row n of weights · x, which is normalised on the way; with ACTIVATION, of row n (gate) and row n + up_offset (up).

    EACH: elements in 16 bytes. ROWS: of a thread. LANES of each of SPLIT warps share a row; UNROLL: runs of a thread in a step.
    """
    RUNS: gl.constexpr = LANES * SPLIT * UNROLL
    STEP: gl.constexpr = RUNS * EACH
    BN: gl.constexpr = ROWS * (num_warps // SPLIT) * (32 // LANES)
    IS_EVEN: gl.constexpr = K % STEP == 0
    cube: gl.constexpr = gl.BlockedLayout(
        [ROWS, 1, EACH], [32 // LANES, LANES, 1], [num_warps // SPLIT, SPLIT, 1], [2, 1, 0]
    )
    plane: gl.constexpr = gl.SliceLayout(2, cube)
    row_layout: gl.constexpr = gl.SliceLayout(1, plane)
    n = gl.program_id(0) * BN + gl.arange(0, BN, layout=row_layout)
    rows = gl.where(n < n_rows, n, 0).to(gl.int64)
    run = gl.arange(0, RUNS, layout=gl.SliceLayout(1, gl.SliceLayout(0, cube)))
    j = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(0, cube)))
    place = gl.expand_dims(run * EACH, 1) + gl.expand_dims(j, 0)  # (RUNS, EACH)
    at = gl.expand_dims(gl.expand_dims(rows * K, 1), 2) + gl.expand_dims(place, 0)
    up_at = at + up_offset.to(gl.int64) * K
    total = gl.zeros([BN, RUNS], gl.float32, plane)
    total_up = gl.zeros([BN, RUNS], gl.float32, plane)
    squares = gl.zeros([RUNS, EACH], gl.float32, gl.SliceLayout(0, cube))
    for first in range(0, K, STEP):
        inside = place < K - first
        w = weights_at(w_ptr + first + at, gl.expand_dims(inside, 0), IS_EVEN)
        u = w
        if ACTIVATION:
            u = weights_at(w_ptr + first + up_at, gl.expand_dims(inside, 0), IS_EVEN)
        x = gl.load(x_ptr + first + place, mask=inside, other=0.0).to(gl.float32)
        if HAS_NORM:
            squares += x * x
            x = x * gl.load(norm_ptr + first + place, mask=inside, other=0.0)
        x = gl.expand_dims(x, 0)
        total += gl.sum(w.to(gl.float32) * x, axis=2)
        if ACTIVATION:
            total_up += gl.sum(u.to(gl.float32) * x, axis=2)
    result = gl.sum(total, axis=1)
    up = result
    if ACTIVATION:
        up = gl.sum(total_up, axis=1)
    if HAS_NORM:
        inverse = 1.0 / gl.sqrt(gl.sum(gl.sum(squares, axis=1), axis=0) / K + epsilon)
        result *= inverse
        up *= inverse
    finish_row(result, up, bias_ptr, out_ptr, n, n_rows, HAS_BIAS, ADDS, ACTIVATION)
