"""Attention over paged keys and values: rotation and storing of what is new, then softmax sums in a fixed order.

A page holds 64 positions of every layer of a shard. Keys lie by tiles of 32 positions (dimension by dimension, so that lanes are
positions), values by tiles of 32 dimensions (position by position, so that lanes are dimensions): no sum ever crosses lanes.
The order (docs/arithmetic.md): blocks of 64 positions with a running maximum inside a span of 512, then span after span.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from potluck.engine.kernels.functions import emit_exp, exp, tanh
from potluck.engine.kernels.lanes import F32, I16, I32, Emitter, Lanes, vector
from potluck.engine.kernels.memory import (
    BATCH_ATTENTION_TASKS,
    BATCH_SPANS,
    BATCH_TILE_COUNT,
    BATCH_TILES,
    BATCH_WORDS,
    INLINE,
    KERNEL,
    KERNEL_OPTIONS,
    TILE_COUNT,
    TILE_PAGES,
    TILE_POSITION,
    TILE_ROW,
    TILE_WORDS,
    float_from_bits,
    floats,
    halfwords,
    words,
)
from potluck.engine.kernels.processor import PROCESSORS, Processor
from potluck.engine.kernels.rows import (
    ROWS_FLOAT,
    ROWS_PADDED,
    ROWS_QUANTISED,
    ROWS_WORDS,
    inverse_root_mean_square,
    quantise_row,
    span,
)
from potluck.engine.kv_format import LARGEST_HALF, PAGE_POSITIONS, TILE

SPAN_POSITIONS = 512
SPAN_PAGES = SPAN_POSITIONS // PAGE_POSITIONS
TILE_ROWS = 32  # query rows (tokens × heads of one group) that share one pass over keys and values
LOWEST_SCORE = np.float32(-3e38)
PROCESSOR_NAMES = tuple(PROCESSORS)

# Where things lie for one layer, as 64-bit words.
(
    QUERIES_IN, KEYS_IN, VALUES_IN, IN_STRIDES, QUERY_BIAS, KEY_BIAS, VALUE_BIAS, QUERY_NORM, KEY_NORM, EPSILON,
    ROTARY_FORM, ROTARY_COS, ROTARY_SIN, ROTARY_DIMENSIONS, SCALE, QUERIES, HEADS, KV_HEADS, HEAD_SIZE, PADDED_HEAD,
    LAYER_OFFSET, HEAD_BYTES, VALUES_OFFSET, WINDOW, SOFT_CAP, SCRATCH, SCRATCH_BYTES, SLOTS, SLOT_FLOATS, TARGET, TILE_CAPACITY,
) = range(31)  # fmt: skip
ATTENTION_WORDS = 31
# IN_STRIDES is the address of three words: row strides of the incoming queries, keys and values, in floats.


def tile_capacity(group: int) -> int:
    """Query rows that a tile may have: those of one token at least, however many heads share a key head."""
    return max(TILE_ROWS, group)


def scratch_floats(head_size: int, padded_head: int, capacity: int) -> int:
    """Float32s that one chunk of `attend` needs: queries, sums, lane sums, maxima, rescales, scores, bounds (64-bit)."""
    return capacity * (head_size + padded_head + 16 + 1 + 1 + PAGE_POSITIONS + 4)


# ---------------------------------------------------------------- emitted pieces


def _load_kv(e: Emitter, processor: Processor, address: ir.Value, lanes: int, is_half: bool) -> Lanes:
    if is_half:
        return processor.half_to_float(e, e.load(vector(I16, lanes), address))
    return e.load(vector(F32, lanes), address)


def _emit_scores(e: Emitter, processor: Processor, rows: int, is_half: bool, values: list[ir.Value]) -> None:
    """Scores of 32 positions for `rows` queries: dimension after dimension."""
    queries, query_bytes, keys, dimensions, scores, score_bytes = values
    size = 2 if is_half else 4
    lanes = processor.lanes * 2
    for first in range(0, TILE, lanes):
        totals = [e.variable(e.floats(0.0, lanes)) for _ in range(rows)]

        def dimension(index: ir.Value, first: int = first, totals: list[Any] = totals) -> None:
            place = e.add(e.add(keys, e.mul(index, TILE * size)), first * size)
            key = _load_kv(e, processor, place, lanes, is_half)
            for row, total in enumerate(totals):
                query = e.broadcast(F32, lanes, e.add(queries, e.mul(query_bytes, row)), e.mul(index, 4))
                total.set(total.get() + query * key)

        e.loop(dimensions, dimension)
        for row, total in enumerate(totals):
            e.store(total.get(), e.add(scores, e.mul(score_bytes, row)), first * 4)


def _emit_accumulate(e: Emitter, processor: Processor, rows: int, is_half: bool, values: list[ir.Value]) -> None:
    """sums += weight · value, position after position from `begin` to `end` of one page, for `rows` queries."""
    sums, sum_bytes, weights, weight_bytes, page_values, begin, end, tiles = values
    size = 2 if is_half else 4
    lanes = processor.lanes * 2

    def dimension_tile(tile: ir.Value) -> None:
        base = e.add(page_values, e.mul(tile, PAGE_POSITIONS * TILE * size))
        for first in range(0, TILE, lanes):
            places = [
                e.add(e.add(sums, e.mul(sum_bytes, row)), e.add(e.mul(tile, TILE * 4), first * 4))
                for row in range(rows)
            ]
            totals = [e.variable(e.load(vector(F32, lanes), place)) for place in places]

            def position(index: ir.Value, first: int = first, totals: list[Any] = totals) -> None:
                p = e.add(begin, index)
                value = _load_kv(e, processor, e.add(e.add(base, e.mul(p, TILE * size)), first * size), lanes, is_half)
                for row, total in enumerate(totals):
                    weight = e.broadcast(F32, lanes, e.add(weights, e.mul(weight_bytes, row)), e.mul(p, 4))
                    total.set(total.get() + weight * value)

            e.loop(e.builder.sub(end, begin), position)
            for total, place in zip(totals, places, strict=True):
                e.store(total.get(), place)

    e.loop(tiles, dimension_tile)


def _greater(e: Emitter, left: Lanes, right: Lanes) -> Lanes:
    """The larger of two; where one is not a number, that."""
    return Lanes(e, e.builder.fcmp_unordered(">", left.value, right.value)).choose(left, right)


def _emit_soften(e: Emitter, values: list[ir.Value]) -> None:
    """For one query and one page: new maximum, rescale of what was summed before, weights in place of the scores."""
    scores, begin, end, lane_sums, maximum, rescale = values
    quarters = range(PAGE_POSITIONS // 16)
    loaded = [e.load(vector(F32, 16), scores, 64 * i) for i in quarters]
    low = e.spread(e.builder.trunc(begin, I32), 16)
    high = e.spread(e.builder.trunc(end, I32), 16)
    masks = []
    for i in quarters:
        places = Lanes(e, ir.Constant(vector(I32, 16), [16 * i + lane for lane in range(16)]))
        after = e.builder.icmp_signed(">=", places.value, low.value)
        masks.append(Lanes(e, e.builder.and_(after, e.builder.icmp_signed("<", places.value, high.value))))
    lowest = e.floats(float(LOWEST_SCORE), 16)
    seen = [mask.choose(part, lowest) for mask, part in zip(masks, loaded, strict=True)]
    top = _greater(e, _greater(e, seen[0], seen[1]), _greater(e, seen[2], seen[3]))
    for width in (8, 4, 2, 1):
        top = _greater(e, top.pick(range(width)), top.pick(range(width, 2 * width)))
    before = e.load(vector(F32, 1), maximum)
    now = _greater(e, before, top)
    factor = emit_exp(e, before - now)
    e.store(now, maximum)
    e.store(factor, rescale)
    new_maximum = e.spread(e.builder.extract_element(now.value, I32(0)), 16)
    total = e.load(vector(F32, 16), lane_sums) * e.spread(e.builder.extract_element(factor.value, I32(0)), 16)
    for i, (mask, part) in enumerate(zip(masks, seen, strict=True)):
        weight = mask.choose(emit_exp(e, part - new_maximum), e.floats(0.0, 16))
        e.store(weight, scores, 64 * i)
        total = total + weight
    e.store(total, lane_sums)


def _emit_store_halves(e: Emitter, processor: Processor, source: ir.Value, target: ir.Value) -> None:
    x = e.load(vector(F32, 16), source)
    largest = e.floats(LARGEST_HALF, 16)
    smallest = e.floats(-LARGEST_HALF, 16)
    x = largest.less(x).choose(largest, x)
    x = x.less(smallest).choose(smallest, x)
    e.store(processor.float_to_half(e, x), target)


@intrinsic(prefer_literal=True)
def _score_tile(
    typing: Any, processor: Any, is_half: Any, rows: Any, queries: Any, query_bytes: Any, keys: Any, dimensions: Any,
    scores: Any, score_bytes: Any,
) -> Any:  # fmt: skip
    chosen, half, count = (
        PROCESSORS[PROCESSOR_NAMES[processor.literal_value]],
        bool(is_half.literal_value),
        rows.literal_value,
    )

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        _emit_scores(Emitter(builder), chosen, count, half, list(values[3:]))
        return context.get_dummy_value()

    return types.void(processor, is_half, rows, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def _accumulate(
    typing: Any, processor: Any, is_half: Any, rows: Any, sums: Any, sum_bytes: Any, weights: Any, weight_bytes: Any,
    page_values: Any, begin: Any, end: Any, tiles: Any,
) -> Any:  # fmt: skip
    chosen, half, count = (
        PROCESSORS[PROCESSOR_NAMES[processor.literal_value]],
        bool(is_half.literal_value),
        rows.literal_value,
    )

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        _emit_accumulate(Emitter(builder), chosen, count, half, list(values[3:]))
        return context.get_dummy_value()

    return types.void(processor, is_half, rows, *[types.int64] * 8), generate


@intrinsic
def _soften(typing: Any, scores: Any, begin: Any, end: Any, lane_sums: Any, maximum: Any, rescale: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        _emit_soften(Emitter(builder), list(values))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def _store_halves(typing: Any, processor: Any, source: Any, target: Any) -> Any:
    chosen = PROCESSORS[PROCESSOR_NAMES[processor.literal_value]]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        _emit_store_halves(Emitter(builder), chosen, values[1], values[2])
        return context.get_dummy_value()

    return types.void(processor, types.int64, types.int64), generate


# ---------------------------------------------------------------- storing what is new


@njit(**INLINE)
def _rotate(x: Any, a: Any, position: int) -> None:
    count = a[ROTARY_DIMENSIONS]
    half = count // 2
    cos = floats(a[ROTARY_COS] + position * half * 4, half)
    sin = floats(a[ROTARY_SIN] + position * half * 4, half)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if a[ROTARY_FORM] == 0 else (i, i + half)
        left = x[first]
        right = x[second]
        x[first] = left * cos[i] - right * sin[i]
        x[second] = left * sin[i] + right * cos[i]


@njit(**INLINE)
def _prepare_head(source: Any, bias: int, norm: int, rotates: bool, a: Any, position: int, head: int, x: Any) -> None:
    """One head of one row into x: bias, norm over the head, rotation."""
    size = a[HEAD_SIZE]
    for i in range(size):
        x[i] = source[i]
    if bias != 0:
        b = floats(bias + head * size * 4, size)
        for i in range(size):
            x[i] = x[i] + b[i]
    if norm != 0:
        weight = floats(norm, size)
        r = inverse_root_mean_square(x, size, float_from_bits(np.int32(a[EPSILON])))
        for i in range(size):
            x[i] = (x[i] * r) * weight[i]
    if rotates:
        _rotate(x, a, position)


@njit(inline="always", **INLINE)
def _store_key(processor, is_half, x, target, lane, size, row16):
    if is_half:
        halves = halfwords(row16, 16)
        slots = halfwords(target, size * TILE)
        for first in range(0, size, 16):
            _store_halves(processor, x.ctypes.data + first * 4, row16)
            for i in range(min(16, size - first)):
                slots[(first + i) * TILE + lane] = halves[i]
    else:
        slots = floats(target, size * TILE)
        for i in range(size):
            slots[i * TILE + lane] = x[i]


@njit(inline="always", **INLINE)
def _store_value(processor, is_half, x, target, position, padded):
    for tile in range(padded // TILE):
        if is_half:
            place = target + (tile * PAGE_POSITIONS + position) * TILE * 2
            _store_halves(processor, x.ctypes.data + tile * TILE * 4, place)
            _store_halves(processor, x.ctypes.data + tile * TILE * 4 + 64, place + 32)
        else:
            slots = floats(target + (tile * PAGE_POSITIONS + position) * TILE * 4, TILE)
            for i in range(TILE):
                slots[i] = x[tile * TILE + i]


def place_kernel(processor: int, is_half: int) -> Any:
    """Queries rotated and scaled into their buffer; new keys and values into their pages. Chunks are spans of tiles."""

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def place(arguments, batch, chunk, chunks):
        a = words(arguments, ATTENTION_WORDS)
        b = words(batch, BATCH_WORDS)
        strides = words(a[IN_STRIDES], 3)
        size = a[HEAD_SIZE]
        padded = a[PADDED_HEAD]
        element = 2 if is_half else 4
        scale = float_from_bits(np.int32(a[SCALE]))
        scratch = a[SCRATCH] + chunk * a[SCRATCH_BYTES]
        x = floats(scratch, padded)
        begin, end = span(b[BATCH_TILE_COUNT], chunk, chunks)
        for i in range(size, padded):
            x[i] = np.float32(0.0)
        for index in range(begin, end):
            tile = words(b[BATCH_TILES] + index * TILE_WORDS * 8, TILE_WORDS)
            for i in range(tile[TILE_COUNT]):
                row = tile[TILE_ROW] + i
                position = tile[TILE_POSITION] + i
                page = words(tile[TILE_PAGES], position // PAGE_POSITIONS + 1)[position // PAGE_POSITIONS]
                inside = position % PAGE_POSITIONS
                for head in range(a[HEADS]):
                    source = floats(a[QUERIES_IN] + (row * strides[0] + head * size) * 4, size)
                    _prepare_head(source, a[QUERY_BIAS], a[QUERY_NORM], True, a, position, head, x)
                    query = floats(a[QUERIES] + (row * a[HEADS] + head) * size * 4, size)
                    for k in range(size):
                        query[k] = x[k] * scale
                for head in range(a[KV_HEADS]):
                    base = page + a[LAYER_OFFSET] + head * a[HEAD_BYTES]
                    source = floats(a[KEYS_IN] + (row * strides[1] + head * size) * 4, size)
                    _prepare_head(source, a[KEY_BIAS], a[KEY_NORM], True, a, position, head, x)
                    target = base + (inside // TILE) * size * TILE * element
                    _store_key(processor, is_half, x, target, inside % TILE, size, scratch + padded * 4)
                    source = floats(a[VALUES_IN] + (row * strides[2] + head * size) * 4, size)
                    _prepare_head(source, a[VALUE_BIAS], 0, False, a, position, head, x)
                    _store_value(processor, is_half, x, base + a[VALUES_OFFSET], inside, padded)

    return place


# ---------------------------------------------------------------- softmax sums


@njit(**INLINE)
def _lane_total(lanes: Any) -> Any:
    s0 = (lanes[0] + lanes[8]) + (lanes[4] + lanes[12])
    s1 = (lanes[1] + lanes[9]) + (lanes[5] + lanes[13])
    s2 = (lanes[2] + lanes[10]) + (lanes[6] + lanes[14])
    s3 = (lanes[3] + lanes[11]) + (lanes[7] + lanes[15])
    return (s0 + s2) + (s1 + s3)


@njit(**INLINE)
def _merge(slot: Any, maximum: Any, total: Any, sums: Any, count: int) -> None:
    """Adds a later span to what `slot` holds: [maximum, total, sums…]."""
    top = slot[0] if slot[0] > maximum else maximum
    before = exp(slot[0] - top)
    after = exp(maximum - top)
    slot[0] = top
    slot[1] = slot[1] * before + total * after
    for i in range(count):
        slot[2 + i] = slot[2 + i] * before + sums[i] * after


@njit(**INLINE)
def first_position(position: int, window: int) -> int:
    return 0 if window == 0 else max(0, position + 1 - window)


@njit(inline="always", **INLINE)
def _score_page(processor, is_half, queries, rows, size, keys, scores, low, high):
    for tile in range(low // TILE, (high + TILE - 1) // TILE):
        place = keys + tile * size * TILE * (2 if is_half else 4)
        row = 0
        while rows - row >= 4:
            target = scores + (row * PAGE_POSITIONS + tile * TILE) * 4
            _score_tile(
                processor, is_half, 4, queries + row * size * 4, size * 4, place, size, target, PAGE_POSITIONS * 4
            )
            row += 4
        target = scores + (row * PAGE_POSITIONS + tile * TILE) * 4
        if rows - row == 3:
            _score_tile(
                processor, is_half, 3, queries + row * size * 4, size * 4, place, size, target, PAGE_POSITIONS * 4
            )
        elif rows - row == 2:
            _score_tile(
                processor, is_half, 2, queries + row * size * 4, size * 4, place, size, target, PAGE_POSITIONS * 4
            )
        elif rows - row == 1:
            _score_tile(
                processor, is_half, 1, queries + row * size * 4, size * 4, place, size, target, PAGE_POSITIONS * 4
            )


@njit(inline="always", **INLINE)
def _add_values(processor, is_half, sums, rows, padded, scores, values, lows, highs):
    """Rows that see the same positions go together; what only some of them see is added row by row, in order."""
    row = 0
    width = PAGE_POSITIONS * 4
    tiles = padded // TILE
    while row < rows:
        together = min(4, rows - row)
        if together == 3 and rows - row > 3:
            together = 2
        low = lows[row]
        high = highs[row]
        for i in range(row + 1, row + together):
            low = max(low, lows[i])
            high = min(high, highs[i])
        high = max(high, low)
        for i in range(row, row + together):
            if lows[i] < min(low, highs[i]):
                _accumulate(
                    processor, is_half, 1, sums + i * padded * 4, 0, scores + i * width, 0, values, lows[i],
                    min(low, highs[i]), tiles,
                )  # fmt: skip
        base = sums + row * padded * 4
        weight = scores + row * width
        if high > low:
            if together == 4:
                _accumulate(processor, is_half, 4, base, padded * 4, weight, width, values, low, high, tiles)
            elif together == 3:
                _accumulate(processor, is_half, 3, base, padded * 4, weight, width, values, low, high, tiles)
            elif together == 2:
                _accumulate(processor, is_half, 2, base, padded * 4, weight, width, values, low, high, tiles)
            else:
                _accumulate(processor, is_half, 1, base, padded * 4, weight, width, values, low, high, tiles)
        for i in range(row, row + together):
            begin = max(high, lows[i])
            if begin < highs[i]:
                _accumulate(
                    processor, is_half, 1, sums + i * padded * 4, 0, scores + i * width, 0, values, begin, highs[i], tiles,
                )  # fmt: skip
        row += together


@njit(inline="always", **INLINE)
def _sum_span(processor, is_half, a, tile, kv_head, rows, group, scratch, first, last):
    """Positions first … last - 1 (one span) for all query rows of the tile."""
    size = a[HEAD_SIZE]
    padded = a[PADDED_HEAD]
    sums_at = scratch + a[TILE_CAPACITY] * size * 4
    lanes_at = sums_at + a[TILE_CAPACITY] * padded * 4
    maxima_at = lanes_at + a[TILE_CAPACITY] * 16 * 4
    rescales_at = maxima_at + a[TILE_CAPACITY] * 4
    scores_at = rescales_at + a[TILE_CAPACITY] * 4
    sums = floats(sums_at, rows * padded)
    lanes = floats(lanes_at, rows * 16)
    maxima = floats(maxima_at, rows)
    rescales = floats(rescales_at, rows)
    scores = floats(scores_at, rows * PAGE_POSITIONS)
    cap = float_from_bits(np.int32(a[SOFT_CAP]))
    lows = words(scores_at + a[TILE_CAPACITY] * PAGE_POSITIONS * 4, rows)
    highs = words(scores_at + a[TILE_CAPACITY] * (PAGE_POSITIONS * 4 + 8), rows)
    for i in range(rows * padded):
        sums[i] = np.float32(0.0)
    for i in range(rows * 16):
        lanes[i] = np.float32(0.0)
    for i in range(rows):
        maxima[i] = LOWEST_SCORE
    pages = words(tile[TILE_PAGES], (last + PAGE_POSITIONS - 1) // PAGE_POSITIONS)
    for number in range(first // PAGE_POSITIONS, (last + PAGE_POSITIONS - 1) // PAGE_POSITIONS):
        start = number * PAGE_POSITIONS
        page = pages[number] + a[LAYER_OFFSET] + kv_head * a[HEAD_BYTES]
        low = PAGE_POSITIONS
        high = 0
        for row in range(rows):
            position = tile[TILE_POSITION] + row // group
            lows[row] = min(max(first_position(position, a[WINDOW]) - start, 0), PAGE_POSITIONS)
            highs[row] = max(min(position + 1 - start, PAGE_POSITIONS), lows[row])
            low = min(low, lows[row])
            high = max(high, highs[row])
        if high <= low:
            continue
        _score_page(processor, is_half, scratch, rows, size, page, scores_at, low, high)
        if a[SOFT_CAP] != 0:
            for row in range(rows):
                for i in range(row * PAGE_POSITIONS + lows[row], row * PAGE_POSITIONS + highs[row]):
                    scores[i] = cap * tanh(scores[i] / cap)
        for row in range(rows):
            if highs[row] > lows[row]:
                _soften(
                    scores_at + row * PAGE_POSITIONS * 4, lows[row], highs[row], lanes_at + row * 64,
                    maxima_at + row * 4, rescales_at + row * 4,
                )  # fmt: skip
                if rescales[row] != np.float32(1.0):
                    for i in range(row * padded, (row + 1) * padded):
                        sums[i] = sums[i] * rescales[row]
        _add_values(processor, is_half, sums_at, rows, padded, scores_at, page + a[VALUES_OFFSET], lows, highs)


@njit(inline="always", **INLINE)
def _keep(a, tile, kv_head, rows, group, scratch, span_number, slots_per_row):
    """Puts the span's sums into their slots, or merges them into the one slot of the row."""
    padded = a[PADDED_HEAD]
    count = a[SLOT_FLOATS]
    sums_at = scratch + a[TILE_CAPACITY] * a[HEAD_SIZE] * 4
    lanes_at = sums_at + a[TILE_CAPACITY] * padded * 4
    maxima = floats(lanes_at + a[TILE_CAPACITY] * 16 * 4, rows)
    for row in range(rows):
        position = tile[TILE_POSITION] + row // group
        first_span = first_position(position, a[WINDOW]) // SPAN_POSITIONS
        if not first_span <= span_number <= position // SPAN_POSITIONS:
            continue
        head = kv_head * group + row % group
        index = (tile[TILE_ROW] + row // group) * a[HEADS] + head
        offset = index * slots_per_row + (span_number if slots_per_row > 1 else 0)
        slot = floats(a[SLOTS] + offset * count * 4, count)
        sums = floats(sums_at + row * padded * 4, padded)
        total = _lane_total(floats(lanes_at + row * 64, 16))
        if slots_per_row > 1 or span_number == first_span:
            slot[0] = maxima[row]
            slot[1] = total
            for i in range(padded):
                slot[2 + i] = sums[i]
        else:
            _merge(slot, maxima[row], total, sums, padded)


def attend_kernel(processor: int, is_half: int) -> Any:
    """Softmax sums of tiles × key heads × spans into slots; a task that owns all spans merges them as it goes."""

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def attend(arguments, batch, chunk, chunks):
        a = words(arguments, ATTENTION_WORDS)
        b = words(batch, BATCH_WORDS)
        size = a[HEAD_SIZE]
        kv_heads = a[KV_HEADS]
        group = a[HEADS] // kv_heads
        spans = b[BATCH_SPANS]
        scratch = a[SCRATCH] + chunk * a[SCRATCH_BYTES]
        begin, end = span(b[BATCH_ATTENTION_TASKS], chunk, chunks)
        for task in range(begin, end):
            tile = words(b[BATCH_TILES] + (task // (kv_heads * spans)) * TILE_WORDS * 8, TILE_WORDS)
            kv_head = task // spans % kv_heads
            rows = tile[TILE_COUNT] * group
            for row in range(rows):
                head = (tile[TILE_ROW] + row // group) * a[HEADS] + kv_head * group + row % group
                source = floats(a[QUERIES] + head * size * 4, size)
                target = floats(scratch + row * size * 4, size)
                for i in range(size):
                    target[i] = source[i]
            first = first_position(tile[TILE_POSITION], a[WINDOW])
            last = tile[TILE_POSITION] + tile[TILE_COUNT]
            first_span = first // SPAN_POSITIONS
            last_span = (last - 1) // SPAN_POSITIONS
            if spans > 1:
                first_span = max(first_span, task % spans)
                last_span = min(last_span, task % spans)
            for number in range(first_span, last_span + 1):
                low = max(first, number * SPAN_POSITIONS)
                high = min(last, (number + 1) * SPAN_POSITIONS)
                _sum_span(processor, is_half, a, tile, kv_head, rows, group, scratch, low, high)
                _keep(a, tile, kv_head, rows, group, scratch, number, spans)

    return attend


def finish_kernel() -> Any:
    """Merges a row's spans in order, divides, and writes the row that the output projection reads. Chunks: spans of tiles."""

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def finish(arguments, batch, chunk, chunks):
        a = words(arguments, ATTENTION_WORDS)
        b = words(batch, BATCH_WORDS)
        size = a[HEAD_SIZE]
        count = a[SLOT_FLOATS]
        spans = b[BATCH_SPANS]
        target = words(a[TARGET], ROWS_WORDS)
        begin, end = span(b[BATCH_TILE_COUNT], chunk, chunks)
        for index in range(begin, end):
            tile = words(b[BATCH_TILES] + index * TILE_WORDS * 8, TILE_WORDS)
            for i in range(tile[TILE_COUNT]):
                row = tile[TILE_ROW] + i
                position = tile[TILE_POSITION] + i
                first_span = first_position(position, a[WINDOW]) // SPAN_POSITIONS
                output = floats(target[ROWS_FLOAT] + row * target[ROWS_PADDED] * 4, a[HEADS] * size)
                for head in range(a[HEADS]):
                    base = a[SLOTS] + (row * a[HEADS] + head) * spans * count * 4
                    slot = floats(base + (first_span * count * 4 if spans > 1 else 0), count)
                    if spans > 1:
                        for number in range(first_span + 1, position // SPAN_POSITIONS + 1):
                            later = floats(base + number * count * 4, count)
                            _merge(slot, later[0], later[1], later[2:], a[PADDED_HEAD])
                    for k in range(size):
                        output[head * size + k] = slot[2 + k] / slot[1]
                if target[ROWS_QUANTISED] != 0:
                    quantise_row(target, row)

    return finish
