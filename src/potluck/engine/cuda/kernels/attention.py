"""Attention over paged keys and values. One token of each session: spans of a fixed number of positions, merged in order, so that a
row's result does not depend on its neighbours or on how many spans the launch has room for. Chunks: blocks of queries.
"""

import triton
import triton.language as tl

from potluck.engine.cuda.kernels.quantise import store_packed

PAGE = tl.constexpr(64)


@triton.jit
def turned(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, position, heads, d, D: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, epsilon,
):  # fmt: skip
    """Rows `heads` of D values at x_ptr: normalised and rotated, as float32 (heads, padded D); zero past D."""
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = d ^ 1
        pair = d // 2
        is_first = (d % 2) == 0
    else:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        pair = tl.where(d < HALF, d, d - HALF)
        is_first = d < HALF
    is_turned = d < ROTARY
    partner = tl.where(is_turned, partner, d)
    is_inside = (d < D)[None, :]
    x = tl.load(x_ptr + heads[:, None] * D + d[None, :], mask=is_inside, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + heads[:, None] * D + partner[None, :], mask=is_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + epsilon)
        x = x * inverse[:, None] * tl.load(norm_ptr + d, mask=d < D, other=0.0)[None, :]
        y = y * inverse[:, None] * tl.load(norm_ptr + partner, mask=d < D, other=0.0)[None, :]
    cos = tl.load(cos_ptr + position * HALF + pair, mask=is_turned, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=is_turned, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def capped(scores, cap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
    return scores


@triton.jit
def as_stored(x, IS_HALF: tl.constexpr):
    if IS_HALF:
        result = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    else:
        result = x
    return result


@triton.jit
def page_scores(
    query, keys_ptr, slot, kv_head, positions, d, low, high, cap, D: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_HALF: tl.constexpr,
):  # fmt: skip
    """(queries, 64) scores of one page; `low` ≤ position < `high` are seen, each (queries, 1) or a number."""
    base = (slot * KV_HEADS + kv_head) * PAGE * D
    at = tl.arange(0, PAGE)
    keys = tl.load(keys_ptr + base + at[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
    if IS_HALF:
        scores = tl.dot(query, keys)
    else:
        scores = tl.dot(query, keys, input_precision="ieee")
    scores = capped(scores, cap, HAS_CAP)
    seen = (positions[None, :] >= low) & (positions[None, :] < high)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def merge_page(
    scores, largest, weight, total, values_ptr, slot, kv_head, d, D: tl.constexpr, KV_HEADS: tl.constexpr, IS_HALF: tl.constexpr
):  # fmt: skip
    """A page's scores into the running maximum, sum of weights and weighted sum of values."""
    new = tl.maximum(largest, tl.max(scores, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    factor = tl.exp(largest - safe)
    weights = tl.exp(scores - safe[:, None])
    base = (slot * KV_HEADS + kv_head) * PAGE * D
    at = tl.arange(0, PAGE)
    values = tl.load(values_ptr + base + at[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    total = total * factor[:, None]
    if IS_HALF:
        total = tl.dot(weights.to(tl.float16), values, total)
    else:
        total = tl.dot(weights, values, total, input_precision="ieee")
    return new, weight * factor + tl.sum(weights, axis=1), total


@triton.jit
def store_heads(
    out_ptr, x, heads, mask, HEADS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Heads of the only row, quantised for the product that follows; their size is a multiple of its groups' and not padded."""
    EACH: tl.constexpr = D // GROUP
    groups = heads[:, None] * EACH + tl.arange(0, EACH)[None, :]
    is_group = (mask[:, None]) & (groups >= 0)
    store_packed(
        out_ptr, tl.reshape(x, [COUNT * EACH, GROUP]), tl.reshape(groups, [COUNT * EACH]), tl.reshape(is_group, [COUNT * EACH]),
        HEADS * D, BITS, GROUP, COUNT * EACH,
    )  # fmt: skip


@triton.jit
def attend_rows_kernel(
    x_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, tables_ptr, positions_ptr, rows_ptr, out_ptr,
    parts_ptr, x_stride, table_stride, out_stride, scale, cap, window, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_HALF: tl.constexpr, SPLITS: tl.constexpr, SPLIT_PAGES: tl.constexpr, NEXT_BITS: tl.constexpr, NEXT_GROUP: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one span of positions. The span with the row's own position stores its key and value first."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_ptr + row)
    table = tables_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(position + 1 - window, 0)
    first_page = split * SPLIT_PAGES
    last_page = tl.minimum(first_page + SPLIT_PAGES - 1, position // PAGE)
    if position >= 0:
        QUERIES: tl.constexpr = HEADS // KV_HEADS
        d = tl.arange(0, PADDED)
        g = tl.arange(0, GROUP)
        heads = kv_head * QUERIES + tl.minimum(g, QUERIES - 1)
        x = x_ptr + row.to(tl.int64) * x_stride
        query = turned(
            x, query_norm_ptr, cos_ptr, sin_ptr, position, heads, d, D, ROTARY, INTERLEAVED, HAS_NORM, epsilon
        )
        query = as_stored(query * scale, IS_HALF)
        if (position // PAGE >= first_page) & (position // PAGE < first_page + SPLIT_PAGES):
            slot = tl.load(table + position // PAGE).to(tl.int64)
            one = kv_head + tl.arange(0, 1)
            key = turned(
                x + HEADS * D,
                key_norm_ptr,
                cos_ptr,
                sin_ptr,
                position,
                one,
                d,
                D,
                ROTARY,
                INTERLEAVED,
                HAS_NORM,
                epsilon,
            )
            value = tl.load(
                x + (HEADS + KV_HEADS) * D + one[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0
            )
            place = ((slot * KV_HEADS + kv_head) * PAGE + position % PAGE) * D + d[None, :]
            tl.store(keys_ptr + place, as_stored(key, IS_HALF), mask=(d < D)[None, :])
            tl.store(values_ptr + place, as_stored(value.to(tl.float32), IS_HALF), mask=(d < D)[None, :])
            tl.debug_barrier()
        largest = tl.full([GROUP], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP], tl.float32)
        total = tl.zeros([GROUP, PADDED], tl.float32)
        for page in range(tl.maximum(first_page, low // PAGE), last_page + 1):
            slot = tl.load(table + page).to(tl.int64)
            positions = page * PAGE + tl.arange(0, PAGE)
            scores = page_scores(
                query, keys_ptr, slot, kv_head, positions, d, low, position + 1, cap, D, KV_HEADS, HAS_CAP, IS_HALF
            )
            largest, weight, total = merge_page(
                scores, largest, weight, total, values_ptr, slot, kv_head, d, D, KV_HEADS, IS_HALF
            )
        is_wanted = (g < QUERIES)[:, None] & (d < D)[None, :]
        if SPLITS == 1:
            result = total / weight[:, None]
            if NEXT_BITS:
                store_heads(out_ptr, result, heads, g < QUERIES, HEADS, D, GROUP, NEXT_BITS, NEXT_GROUP)
            else:
                at = out_ptr + row.to(tl.int64) * out_stride + heads[:, None] * D + d[None, :]
                tl.store(at, result.to(out_ptr.dtype.element_ty), mask=is_wanted)
        else:
            part = parts_ptr + ((row * HEADS + heads) * SPLITS + split).to(tl.int64) * (D + 2)
            tl.store(part[:, None] + d[None, :], total, mask=is_wanted)
            tl.store(part + D, largest, mask=g < QUERIES)
            tl.store(part + D + 1, weight, mask=g < QUERIES)


@triton.jit
def merge_spans_kernel(
    parts_ptr, positions_ptr, out_ptr, out_stride, HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    SPLITS: tl.constexpr, NEXT_BITS: tl.constexpr, NEXT_GROUP: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    if tl.load(positions_ptr + row) >= 0:
        base = parts_ptr + ((row * HEADS + head) * SPLITS).to(tl.int64) * (D + 2)
        largest = float("-inf")
        weight = 0.0
        total = tl.zeros([PADDED], tl.float32)
        for split in range(SPLITS):
            part = base + split * (D + 2)
            top = tl.load(part + D)
            new = tl.maximum(largest, top)
            safe = tl.where(new == float("-inf"), 0.0, new)
            before, after = tl.exp(largest - safe), tl.exp(top - safe)
            values = tl.load(part + d, mask=d < D, other=0.0)
            total = total * before + values * after
            weight = weight * before + tl.load(part + D + 1) * after
            largest = new
        result = total / weight
        if NEXT_BITS:
            heads = head + tl.arange(0, 1)
            store_heads(out_ptr, result[None, :], heads, heads >= 0, HEADS, D, 1, NEXT_BITS, NEXT_GROUP)
        else:
            at = out_ptr + row.to(tl.int64) * out_stride + head * D + d
            tl.store(at, result.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def place_chunk_kernel(
    x_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, table_ptr, queries_ptr, start, x_stride, scale,
    epsilon, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, IS_HALF: tl.constexpr, HEADS_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
):  # fmt: skip
    """One token: its queries rotated and scaled, its keys and values into their page."""
    row = tl.program_id(0)
    position = start + row
    d = tl.arange(0, PADDED)
    x = x_ptr + row.to(tl.int64) * x_stride
    h = tl.arange(0, HEADS_PADDED)
    heads = tl.minimum(h, HEADS - 1)
    query = turned(x, query_norm_ptr, cos_ptr, sin_ptr, position, heads, d, D, ROTARY, INTERLEAVED, HAS_NORM, epsilon)
    place = queries_ptr + row.to(tl.int64) * HEADS * D + heads[:, None] * D + d[None, :]
    tl.store(place, as_stored(query * scale, IS_HALF), mask=(h < HEADS)[:, None] & (d < D)[None, :])
    n = tl.arange(0, KV_PADDED)
    kv_heads = tl.minimum(n, KV_HEADS - 1)
    key = turned(
        x + HEADS * D, key_norm_ptr, cos_ptr, sin_ptr, position, kv_heads, d, D, ROTARY, INTERLEAVED, HAS_NORM, epsilon
    )
    inside = (n < KV_HEADS)[:, None] & (d < D)[None, :]
    value = tl.load(x + (HEADS + KV_HEADS) * D + kv_heads[:, None] * D + d[None, :], mask=inside, other=0.0)
    slot = tl.load(table_ptr + position // PAGE).to(tl.int64)
    at = ((slot * KV_HEADS + kv_heads) * PAGE + position % PAGE)[:, None] * D + d[None, :]
    tl.store(keys_ptr + at, as_stored(key, IS_HALF), mask=inside)
    tl.store(values_ptr + at, as_stored(value.to(tl.float32), IS_HALF), mask=inside)


@triton.jit
def attend_chunk_kernel(
    queries_ptr, keys_ptr, values_ptr, table_ptr, out_ptr, start, count, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_HALF: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head over all pages that any of them sees."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest first
    kv_head = head // (HEADS // KV_HEADS)
    rows = block * BM + tl.arange(0, BM)
    d = tl.arange(0, PADDED)
    is_inside = (rows < count)[:, None] & (d < D)[None, :]
    place = rows.to(tl.int64)[:, None] * (HEADS * D) + head * D + d[None, :]
    query = tl.load(queries_ptr + place, mask=is_inside, other=0.0)
    own = start + rows
    low = own * 0
    first_page = 0
    if HAS_WINDOW:
        low = tl.maximum(own + 1 - window, 0)
        first_page = tl.maximum(start + block * BM + 1 - window, 0) // PAGE
    last = tl.minimum(start + block * BM + BM - 1, start + count - 1)
    largest = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, PADDED], tl.float32)
    for page in range(first_page, last // PAGE + 1):
        slot = tl.load(table_ptr + page).to(tl.int64)
        positions = page * PAGE + tl.arange(0, PAGE)
        scores = page_scores(
            query,
            keys_ptr,
            slot,
            kv_head,
            positions,
            d,
            low[:, None],
            own[:, None] + 1,
            cap,
            D,
            KV_HEADS,
            HAS_CAP,
            IS_HALF,
        )
        largest, weight, total = merge_page(
            scores, largest, weight, total, values_ptr, slot, kv_head, d, D, KV_HEADS, IS_HALF
        )
    weight = tl.where(weight == 0.0, 1.0, weight)
    tl.store(out_ptr + place, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=is_inside)
