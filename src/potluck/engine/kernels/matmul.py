"""Products of packed weights with a few or many rows of activations, emitted per format and processor.

For one output row and one token the order is fixed (docs/arithmetic.md): block after block of 32 columns, integers exactly,
then `acc = acc + ((d·da)·f32(sum) + m·sa)`. Lanes are rows, so neither the width of the processor nor the number of tokens
that share a pass over the weights can change a bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from potluck.engine.kernels.lanes import F32, I8, I16, I32, I64, Emitter, Lanes, Variable, vector
from potluck.engine.kernels.layout import BLOCK, LAYOUT_BY_CODE, SIX_HIGH_AT, SIX_LOW_AT, FloatLayout, QuantLayout
from potluck.engine.kernels.memory import BATCH_ROWS, INLINE, KERNEL, KERNEL_OPTIONS, words
from potluck.engine.kernels.processor import PROCESSORS, ROWS, Processor, reading_ahead

PROCESSOR_NAMES = tuple(PROCESSORS)
_CACHE_BYTES = (
    192 * 1024
)  # of activations that one pass over a thread's weights should touch: they stay in the L2 cache

# Arguments of a product, as 64-bit words.
(
    WEIGHTS,
    GROUPS,
    BLOCKS,
    GROUP_BYTES,
    ACTIVATION_Q,
    ACTIVATION_D,
    ACTIVATION_S,
    ACTIVATION_SUMS,
    OUTPUT,
    OUTPUT_STRIDE,
) = range(10)
MATMUL_WORDS = 10


class _Operands:
    """The addresses of one tile: weights of a group, activations of its first token, where the results go."""

    def __init__(self, values: list[ir.Value]) -> None:
        self.weights, self.blocks, self.q, self.d, self.s, self.sums, self.output, self.stride = values


class _Tile:
    """Emits `tokens` × 16 rows for a quantised format."""

    def __init__(self, e: Emitter, processor: Processor, layout: QuantLayout, operands: _Operands, tokens: int) -> None:
        self.e, self.processor, self.layout, self.at, self.tokens = e, processor, layout, operands, tokens
        self.lanes = processor.lanes
        self.row_bytes = e.mul(operands.blocks, BLOCK)
        self.share = layout.super_bytes // layout.blocks_per_super  # of a super-block, for each of its blocks
        self.six_bits = (
            e.room(256) if layout.scales == "super" else None
        )  # as bytes: scales of eight blocks, then minimums

    def emit(self) -> None:
        halves = range(ROWS // self.lanes)
        if self.tokens == 1:
            self._pass(list(halves))  # weights come from memory: read them in one stream
        else:
            for half in halves:  # weights come from the cache the second time: keep the sums in registers instead
                self._pass([half])

    def _pass(self, halves: list[int]) -> None:
        e, layout = self.e, self.layout
        zero = e.floats(0.0, self.lanes)
        sums = {(half, token): e.variable(zero) for half in halves for token in range(self.tokens)}
        supers = e.builder.udiv(self.at.blocks, e.integer(layout.blocks_per_super))

        def body(index: ir.Value) -> None:
            address = e.add(self.at.weights, e.mul(index, layout.super_bytes))
            first_block = e.mul(index, layout.blocks_per_super)
            scales = {half: self._super_scales(address, half) for half in halves}
            if self.six_bits is not None:
                self._spread_six_bits(address, self.six_bits)

            def block(part: ir.Value) -> None:
                place = e.add(address, e.add(e.mul(part, layout.part), layout.first_part))
                small = place if self.six_bits is None else e.add(self.six_bits, e.mul(part, ROWS))
                if self.tokens == 1 or halves[0] == 0:
                    self._prefetch(e.add(address, e.mul(part, self.share)))
                for half in halves:
                    self._block(place, small, e.add(first_block, part), half, scales[half], sums)

            # A loop, not eight copies: processors that read ahead by themselves do it for each load instruction, and know only so many.
            e.loop(e.integer(layout.blocks_per_super), block)

        e.loop(supers, body)
        for (half, token), total in sums.items():
            place = e.add(e.mul(e.mul(self.at.stride, token), 4), half * self.lanes * 4)
            e.store(total.get(), self.at.output, place)

    def _prefetch(self, place: ir.Value) -> None:
        """A block's share of the lines, some way ahead: a few at a time, as a burst would only wait for itself."""
        ahead = reading_ahead(self.tokens)
        for line in range(0, self.share, 64):
            self.e.prefetch(place, ahead.distance_bytes + line, ahead.level)

    def _halves(self, address: ir.Value, offset: int, half: int) -> Lanes:
        raw = self.e.load(vector(I16, self.lanes), address, offset + half * self.lanes * 2)
        return self.processor.half_to_float(self.e, raw)

    def _super_scales(self, address: ir.Value, half: int) -> list[Lanes]:
        if self.layout.scales == "block":
            return []
        return [self._halves(address, 32 * i, half) for i in range(2 if self.layout.has_minimum else 1)]

    def _bytes_to_float(self, address: ir.Value, offset: int, half: int) -> Lanes:
        raw = self.e.load(vector(I8, self.lanes), address, offset + half * self.lanes)
        return raw.widen(I32, signed=False).to_float()

    def _spread_six_bits(self, address: ir.Value, room: ir.Value) -> None:
        """Once for eight blocks, in a few wide operations; the file keeps them so, and memory is what one token waits for."""
        e = self.e
        high = e.load(vector(I8, 64), address, SIX_HIGH_AT)
        for i in range(2):
            low = e.load(vector(I8, 64), address, SIX_LOW_AT + 64 * i)
            e.store((low & _bytes(e, 64, 15)) | _bits_four_five(e, high, 2 * i, 64), room, 64 * i)
            e.store((low >> _bytes(e, 64, 4)) | _bits_four_five(e, high, 2 * i + 1, 64), room, 128 + 64 * i)

    def _scales(self, small: ir.Value, half: int, super_scales: list[Lanes]) -> tuple[Lanes, Lanes | None]:
        """The block's scale and minimum as float32; products of a half and 6 bits are exact."""
        if self.layout.scales == "block":
            d = self._halves(small, 0, half)
            return d, self._halves(small, 32, half) if self.layout.has_minimum else None
        if self.layout.scales == "super16":
            return super_scales[0], None
        d = super_scales[0] * self._bytes_to_float(small, 0, half)
        negative = self.e.floats(-1.0, self.lanes)
        return d, (super_scales[1] * negative) * self._bytes_to_float(small, 128, half)

    def _unpack(self, part: ir.Value, half: int) -> list[Lanes]:
        """Eight vectors of unsigned bytes, 4 columns by `lanes` rows each."""
        e, layout, width = self.e, self.layout, self.lanes * 4
        count = 8 if layout.bits == 8 else 4
        offset = half * width
        stored = [e.load(vector(I8, width), part, layout.nibbles_at + 64 * j + offset) for j in range(count)]
        if layout.bits == 8:
            return stored
        low = [lanes & _bytes(e, width, 15) for lanes in stored]
        unpacked = low + [lanes >> _bytes(e, width, 4) for lanes in stored]
        if layout.high_bits == 1:
            high = e.load(vector(I8, width), part, layout.high_at + offset)
            return [lanes | _bit_four(e, high, j, width) for j, lanes in enumerate(unpacked)]
        if layout.high_bits == 2:
            pairs = [e.load(vector(I8, width), part, layout.high_at + 64 * i + offset) for i in range(2)]
            return [lanes | _bits_four_five(e, pairs[j // 4], j % 4, width) for j, lanes in enumerate(unpacked)]
        return unpacked

    def _activation_bytes(self, token: int, block: ir.Value) -> list[Lanes]:
        e = self.e
        address = e.add(e.add(self.at.q, e.mul(self.row_bytes, token)), e.mul(block, BLOCK))
        width = vector(I8, self.lanes * 4)
        return [e.broadcast(I32, self.lanes, address, 4 * j).view(width) for j in range(8)]

    def _per_block(
        self, base: ir.Value, token: int, block: ir.Value, element: ir.Type, per: int = 1, index: int = 0
    ) -> Lanes:
        e = self.e
        place = e.add(e.mul(e.add(e.mul(self.at.blocks, token), block), 4 * per), 4 * index)
        return e.broadcast(element, self.lanes, base, place)

    def _block(
        self, place: ir.Value, small: ir.Value, block: ir.Value, half: int, super_scales: list[Lanes],
        totals: dict[tuple[int, int], Variable],
    ) -> None:  # fmt: skip
        e, layout = self.e, self.layout
        d, minimum = self._scales(small, half, super_scales)
        weights = self._unpack(place, half)
        activations = [self._activation_bytes(token, block) for token in range(self.tokens)]
        if layout.scales == "super16":
            sums = self._scaled_sixteens(place, half, block, weights, activations)
        else:
            sums = self.processor.dot(e, weights, activations, layout.bits)
            if layout.offset and not (layout.bits == 8 and self.processor.signs_bytes):
                sums = [self._without_offset(total, token, block) for token, total in enumerate(sums)]
        for token, total in enumerate(sums):
            scaled = (d * self._per_block(self.at.d, token, block, F32)) * total.to_float()
            if minimum is not None:
                scaled = scaled + minimum * self._per_block(self.at.s, token, block, F32)
            variable = totals[half, token]
            variable.set(variable.get() + scaled)

    def _without_offset(self, total: Lanes, token: int, block: ir.Value) -> Lanes:
        offset = self.e.splat_constant(I32, self.lanes, self.layout.offset)
        low, high = (self._per_block(self.at.sums, token, block, I32, per=2, index=i) for i in range(2))
        return total - (low + high) * offset

    def _scaled_sixteens(
        self, part: ir.Value, half: int, block: ir.Value, weights: list[Lanes], activations: list[list[Lanes]]
    ) -> list[Lanes]:
        """Q6_K: two sums of 16 columns, each with its int8 scale; still exact integers."""
        e, layout = self.e, self.layout
        totals: list[Lanes] | None = None
        offset = e.splat_constant(I32, self.lanes, layout.offset)
        for i in range(2):
            span = slice(4 * i, 4 * i + 4)
            sums = self.processor.dot(e, weights[span], [bytes_of[span] for bytes_of in activations], layout.bits)
            raw = e.load(vector(I8, self.lanes), part, 16 * i + half * self.lanes)
            scale = raw.widen(I32, signed=True)
            scaled = [
                (total - self._per_block(self.at.sums, token, block, I32, per=2, index=i) * offset) * scale
                for token, total in enumerate(sums)
            ]
            totals = scaled if totals is None else [a + b for a, b in zip(totals, scaled, strict=True)]
        assert totals is not None
        return totals


def _bytes(e: Emitter, count: int, value: int) -> Lanes:
    return e.splat_constant(I8, count, value)


def _bit_four(e: Emitter, high: Lanes, j: int, width: int) -> Lanes:
    shifted = high << _bytes(e, width, 4 - j) if j < 4 else high >> _bytes(e, width, j - 4)
    return shifted & _bytes(e, width, 0x10)


def _bits_four_five(e: Emitter, high: Lanes, j: int, width: int) -> Lanes:
    shifted = high << _bytes(e, width, 4 - 2 * j) if j < 3 else high >> _bytes(e, width, 2)
    return shifted & _bytes(e, width, 0x30)


class _FloatTile:
    """Emits `tokens` × 16 rows for unquantised weights: per block a sum from zero, column by column, added to the total."""

    def __init__(self, e: Emitter, processor: Processor, layout: FloatLayout, operands: _Operands, tokens: int) -> None:
        self.e, self.processor, self.layout, self.at, self.tokens = e, processor, layout, operands, tokens

    def emit(self) -> None:
        e, zero = self.e, self.e.floats(0.0, ROWS)
        totals = [e.variable(zero) for _ in range(self.tokens)]
        column_bytes = ROWS * self.layout.element_bytes

        def block(index: ir.Value) -> None:
            weights = e.add(self.at.weights, e.mul(index, BLOCK * column_bytes))
            parts = [e.variable(zero) for _ in totals]

            def column(place: ir.Value) -> None:
                weight = self._weight(e.add(weights, e.mul(place, column_bytes)))
                for token, part in enumerate(parts):
                    part.set(part.get() + weight * self._activation(token, e.add(e.mul(index, BLOCK), place)))

            e.loop(e.integer(BLOCK), column)
            for total, part in zip(totals, parts, strict=True):
                total.set(total.get() + part.get())

        e.loop(self.at.blocks, block)
        for token, total in enumerate(totals):
            e.store(total.get(), self.at.output, e.mul(e.mul(self.at.stride, token), 4))

    def _weight(self, address: ir.Value) -> Lanes:
        e = self.e
        if self.layout.name == "F32":
            return e.load(vector(F32, ROWS), address)
        raw = e.load(vector(I16, ROWS), address)
        if self.layout.name == "F16":
            return self.processor.half_to_float(e, raw)
        return (raw.widen(I32, signed=False) << e.splat_constant(I32, ROWS, 16)).view(vector(F32, ROWS))

    def _activation(self, token: int, column: ir.Value) -> Lanes:
        e = self.e
        row = e.mul(e.mul(self.at.blocks, BLOCK * 4), token)
        return e.broadcast(F32, ROWS, e.add(self.at.q, row), e.mul(column, 4))


@contextmanager
def _while_left(builder: ir.IRBuilder, token: ir.Value, last: ir.Value, tokens: int) -> Iterator[None]:
    """Repeats the body while at least `tokens` are left before `last`."""
    head, body, done = (builder.append_basic_block(name) for name in ("tokens.head", "tokens.body", "tokens.done"))
    builder.branch(head)
    builder.position_at_end(head)
    left = builder.sub(last, builder.load(token))
    builder.cbranch(builder.icmp_signed(">=", left, ir.Constant(I64, tokens)), body, done)
    builder.position_at_end(body)
    yield
    builder.branch(head)
    builder.position_at_end(done)


def _emit_tokens(e: Emitter, processor: Processor, code: int, values: list[ir.Value]) -> None:
    """All tokens of a span against one group, the largest tiles first."""
    layout = LAYOUT_BY_CODE[code]
    weights, blocks, q, d, s, sums, output, stride, first, last = values
    is_float = isinstance(layout, FloatLayout)
    builder = e.builder
    token = cgutils.alloca_once_value(builder, first)
    for tokens in processor.tiles:
        with _while_left(builder, token, last, tokens):
            t = builder.load(token)
            row = e.mul(blocks, t)
            operands = _Operands(
                [
                    weights,
                    blocks,
                    e.add(q, e.mul(row, BLOCK * 4 if is_float else BLOCK)),
                    e.add(d, e.mul(row, 4)),
                    e.add(s, e.mul(row, 4)),
                    e.add(sums, e.mul(row, 8)),
                    e.add(output, e.mul(e.mul(stride, t), 4)),
                    stride,
                ]
            )
            if isinstance(layout, FloatLayout):
                _FloatTile(e, processor, layout, operands, tokens).emit()
            else:
                _Tile(e, processor, layout, operands, tokens).emit()
            builder.store(e.add(t, tokens), token)


@intrinsic(prefer_literal=True)
def _multiply_group(
    typing: Any, code: Any, processor: Any, weights: Any, blocks: Any, q: Any, d: Any, s: Any, sums: Any, output: Any,
    stride: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    chosen = PROCESSORS[PROCESSOR_NAMES[processor.literal_value]]
    layout_code = code.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        _emit_tokens(Emitter(builder), chosen, layout_code, list(values[2:]))
        return context.get_dummy_value()

    return types.void(code, processor, *[types.int64] * 10), generate


@njit(**INLINE)
def with_whole_tiles(rows: int, largest: int) -> int:
    """So many rows are computed where these are wanted: a pass over the weights costs more than a row or three that nobody looks at.

    Buffers have room for them. SmolLM2, one thread of Zen 5, 3, 5, 6 and 7 rows: 4.6, 5.8, 6.1, 6.5 ms; with tiles of 2 and 1 as well
    6.0, 8.1, 8.9, 9.6 ms.
    """
    rest = rows % largest
    if rest == 3:
        return rows + 1
    if rest > 4:
        return rows + largest - rest
    return rows


def matmul_kernel(code: int, processor: int) -> Any:
    """The product kernel for one layout on one processor; compiled on first use, then cached on disk."""
    largest = PROCESSORS[PROCESSOR_NAMES[processor]].tiles[0]

    @cfunc(KERNEL, **KERNEL_OPTIONS)
    def matmul(arguments, batch, chunk, chunks):
        a = words(arguments, MATMUL_WORDS)
        rows = with_whole_tiles(words(batch, 1)[BATCH_ROWS], largest)
        blocks = a[BLOCKS]
        span = max(16, _CACHE_BYTES // (blocks * BLOCK) // 8 * 8)
        begin = a[GROUPS] * chunk // chunks
        end = a[GROUPS] * (chunk + 1) // chunks
        for first in range(0, rows, span):
            last = min(rows, first + span)
            for group in range(begin, end):
                _multiply_group(
                    code, processor, a[WEIGHTS] + group * a[GROUP_BYTES], blocks, a[ACTIVATION_Q], a[ACTIVATION_D],
                    a[ACTIVATION_S], a[ACTIVATION_SUMS], a[OUTPUT] + group * 64, a[OUTPUT_STRIDE], first, last,
                )  # fmt: skip

    return matmul
