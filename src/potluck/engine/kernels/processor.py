"""What this processor can do, and how each kind does the one thing that differs: the integer dot product of a block.

Three kinds give the same bits, since integers are exact: `avx512` (VNNI), `avx2`, and `portable` (plain LLVM vectors, for
anything else). A further one (NEON) is a further class here and nothing else.
"""

from typing import NamedTuple, Protocol

import llvmlite.binding as llvm
from llvmlite import ir

from potluck.engine.kernels.lanes import F16, F32, I8, I16, I32, USED_ONCE, Emitter, Lanes, vector

ROWS = 16  # rows that lie side by side in packed weights
LARGEST_TILE = 8  # tokens that one pass over the weights serves at most


class Processor(Protocol):
    """Emits what differs between processors. `lanes` rows are worked on at once (8 or 16, half or all of a group)."""

    name: str
    lanes: int
    tiles: tuple[int, ...]  # how many tokens one pass over the weights may serve, largest first
    signs_bytes: bool  # whether `dot` takes the 128 off eight-bit weights by itself

    def dot(self, e: Emitter, weights: list[Lanes], activations: list[list[Lanes]], bits: int) -> list[Lanes]:
        """Σ w·a per row and token.

        `weights[j]`: unsigned bytes of `bits` bits, 4 per row; `activations[token][j]`: the 4 signed bytes, repeated.
        """
        ...

    def half_to_float(self, e: Emitter, halves: Lanes) -> Lanes: ...

    def float_to_half(self, e: Emitter, floats: Lanes) -> Lanes:
        """Rounded to nearest even; the caller has clamped to ±65504. Bits as i16."""
        ...


class _HardwareHalves:
    """fp16 conversions where the processor has them (F16C and later)."""

    def half_to_float(self, e: Emitter, halves: Lanes) -> Lanes:
        as_half = e.builder.bitcast(halves.value, vector(F16, halves.count))
        return Lanes(e, e.builder.fpext(as_half, vector(F32, halves.count)))

    def float_to_half(self, e: Emitter, floats: Lanes) -> Lanes:
        rounded = e.builder.fptrunc(floats.value, vector(F16, floats.count))
        return Lanes(e, e.builder.bitcast(rounded, vector(I16, floats.count)))


class Avx512(_HardwareHalves):
    name = "avx512"
    lanes = 16
    tiles: tuple[int, ...] = (LARGEST_TILE, 4, 2, 1)
    signs_bytes = False

    def dot(self, e: Emitter, weights: list[Lanes], activations: list[list[Lanes]], bits: int) -> list[Lanes]:
        sums = [e.splat_constant(I32, 16, 0)] * len(activations)
        for j, weight in enumerate(weights):
            for token, bytes_of in enumerate(activations):
                sums[token] = self._multiply_add(e, sums[token], weight, bytes_of[j])
        return sums

    def _multiply_add(self, e: Emitter, total: Lanes, weight: Lanes, activation: Lanes) -> Lanes:
        # The intrinsic took <16 x i32> for its byte operands until LLVM 21 and takes <64 x i8> since.
        operand = vector(I8, 64) if llvm.llvm_version_info[0] >= 21 else vector(I32, 16)
        return e.intrinsic(
            "llvm.x86.avx512.vpdpbusd.512", vector(I32, 16), total, weight.view(operand), activation.view(operand)
        )


class Avx2(_HardwareHalves):
    name = "avx2"
    lanes = 8
    tiles: tuple[int, ...] = (4, 2, 1)
    signs_bytes = True

    def dot(self, e: Emitter, weights: list[Lanes], activations: list[list[Lanes]], bits: int) -> list[Lanes]:
        if bits == 8:
            return self._dot_bytes(e, weights, activations)
        # Sums of two products each go into 16 bits; so many of them fit before we must widen.
        fit = 32767 // (2 * ((1 << bits) - 1) * 127)
        totals: list[Lanes | None] = [None] * len(activations)
        for first in range(0, len(weights), fit):
            partial: list[Lanes | None] = [None] * len(activations)
            for j in range(first, min(first + fit, len(weights))):
                for token, bytes_of in enumerate(activations):
                    product = _multiply_pairs(e, weights[j], bytes_of[j])
                    before = partial[token]
                    partial[token] = product if before is None else before + product
            _add_widened(e, totals, partial)
        return [total for total in totals if total is not None]

    def _dot_bytes(self, e: Emitter, weights: list[Lanes], activations: list[list[Lanes]]) -> list[Lanes]:
        """Eight-bit weights come with 128 added; |w| ≤ 128 as unsigned times ±a keeps each pair inside 16 bits."""
        totals: list[Lanes | None] = [None] * len(activations)
        for j, weight in enumerate(weights):
            signed = weight ^ e.splat_constant(I8, 32, -128)
            size = Lanes(e, e.call("llvm.abs.v32i8", vector(I8, 32), [signed.value, ir.Constant(ir.IntType(1), 0)]))
            products: list[Lanes | None] = []
            for bytes_of in activations:
                turned = e.intrinsic("llvm.x86.avx2.psign.b", vector(I8, 32), bytes_of[j], signed)
                products.append(_multiply_pairs(e, size, turned))
            _add_widened(e, totals, products)
        return [total for total in totals if total is not None]


def _multiply_pairs(e: Emitter, unsigned: Lanes, signed: Lanes) -> Lanes:
    return e.intrinsic("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), unsigned, signed)


def _add_widened(e: Emitter, totals: list[Lanes | None], partial: list[Lanes | None]) -> None:
    ones = e.splat_constant(I16, 16, 1)
    for token, sums in enumerate(partial):
        assert sums is not None
        wide = e.intrinsic("llvm.x86.avx2.pmadd.wd", vector(I32, 8), sums, ones)
        before = totals[token]
        totals[token] = wide if before is None else before + wide


class Portable:
    name = "portable"
    lanes = 8
    tiles: tuple[int, ...] = (2, 1)
    signs_bytes = False

    def dot(self, e: Emitter, weights: list[Lanes], activations: list[list[Lanes]], bits: int) -> list[Lanes]:
        wide = [weight.widen(I16, signed=False) for weight in weights]
        return [self._dot_one(e, wide, bytes_of) for bytes_of in activations]

    def _dot_one(self, e: Emitter, weights: list[Lanes], activations: list[Lanes]) -> Lanes:
        total = e.splat_constant(I32, 8, 0)
        for weight, activation in zip(weights, activations, strict=True):
            product = weight * activation.widen(I16, signed=True)  # |255 · 127| fits in 16 bits
            for place in range(4):
                total = total + product.pick(range(place, 32, 4)).widen(I32, signed=True)
        return total

    def half_to_float(self, e: Emitter, halves: Lanes) -> Lanes:
        """Moves the bits into place and lets one exact multiplication fix the exponent; subnormals come out right."""
        count = halves.count
        bits = halves.view(vector(I16, count)).widen(I32, signed=False)
        sign = (bits & _all(e, count, 0x8000)) << _all(e, count, 16)
        magnitude = (bits & _all(e, count, 0x7FFF)) << _all(e, count, 13)
        scaled = magnitude.view(vector(F32, count)) * e.floats(2.0**112, count)
        is_finite = Lanes(e, e.builder.icmp_unsigned("<", magnitude.value, _all(e, count, 0x0F800000).value))
        infinite = magnitude | _all(e, count, 0x7F800000)
        chosen = is_finite.choose(scaled.view(vector(I32, count)), infinite)
        return (chosen | sign).view(vector(F32, count))

    def float_to_half(self, e: Emitter, floats: Lanes) -> Lanes:
        count = floats.count
        bits = floats.view(vector(I32, count))
        sign = (bits & _all(e, count, -0x80000000)) >> _all(e, count, 16)
        magnitude = bits & _all(e, count, 0x7FFFFFFF)
        # Below 2**-14 a half is a multiple of 2**-24: adding 0.5 in float32 rounds to exactly those steps.
        tiny = magnitude.view(vector(F32, count)) + e.floats(0.5, count)
        tiny_bits = tiny.view(vector(I32, count)) - _all(e, count, 0x3F000000)
        odd = (magnitude >> _all(e, count, 13)) & _all(e, count, 1)
        normal = (magnitude + _all(e, count, 0xC8000FFF - (1 << 32)) + odd) >> _all(e, count, 13)
        is_tiny = Lanes(e, e.builder.icmp_unsigned("<", magnitude.value, _all(e, count, 0x38800000).value))
        is_bad = Lanes(e, e.builder.icmp_unsigned(">", magnitude.value, _all(e, count, 0x7F800000).value))
        half = is_bad.choose(_all(e, count, 0x7E00), is_tiny.choose(tiny_bits, normal)) | sign
        return Lanes(e, e.builder.trunc(half.value, vector(I16, count)))


def _all(e: Emitter, count: int, value: int) -> Lanes:
    return e.splat_constant(I32, count, value)


PROCESSORS: dict[str, Processor] = {"avx512": Avx512(), "avx2": Avx2(), "portable": Portable()}

_AVX2 = ("avx2", "f16c", "sse4.1")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512vnni")


class ReadingAhead(NamedTuple):
    """`level`: the cache that weights are asked into; USED_ONCE: they are to displace nothing from any."""

    level: int
    distance_bytes: int


def reading_ahead(tokens: int) -> ReadingAhead:
    """How kernels for so many tokens ask for weights before they need them.

    On a Xeon into the first cache, which gains 10 to 30 %. AMD's read ahead by themselves, and being asked for the first or second cache
    only disturbs them while there is little to compute: 27 tokens/s instead of 32 (1.5B shape, Q4_K, one thread of Zen 4). But they can be
    told that what they read is not wanted again, and then other programs' code and data stay in the caches, a daemon's above all: a hop of
    SmolLM2 takes 0.27 ms instead of 0.34 on two cores (docs/hop.md), and the 1.5B shape decodes 5 % faster; SmolLM2, of which some stays in
    the third cache otherwise, 3 % slower. With eight tokens they do not see far enough that way: 10.0 ms instead of 9.1, which it takes if
    they are asked from further away, and into the second cache; the first waits for so few lines at once that eight-bit weights came at
    12 GB/s instead of 18.
    """
    if not llvm.get_host_cpu_name().startswith("znver"):
        return ReadingAhead(level=1, distance_bytes=4096)
    if tokens < 8:
        return ReadingAhead(USED_ONCE, distance_bytes=256)
    return ReadingAhead(level=2, distance_bytes=8192)


def detect() -> str:
    """The name of the fastest kind that this processor can run."""
    features = llvm.get_host_cpu_features()
    if all(features.get(name) for name in _AVX512):
        return "avx512"
    return "avx2" if all(features.get(name) for name in _AVX2) else "portable"
