"""Raw memory for kernels: addresses as 64-bit integers, seen as arrays; atomic words; calls through an address.

A kernel is a C function `kernel(arguments, batch, chunk, chunks)`: both first arguments are addresses of 64-bit words, and it does
the chunk-th of `chunks` equal parts of its work. Callers keep the memory alive.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from potluck.engine.kernels.lanes import I64, Emitter

KERNEL = types.void(types.int64, types.int64, types.int64, types.int64)
KERNEL_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "boundscheck": False}
INLINE: dict[str, Any] = {"error_model": "numpy", "boundscheck": False, "nogil": True}

# The batch that every kernel of a program sees, as 64-bit words. Rows are cut into tiles: some consecutive tokens of one session.
# BATCH_SPANS: how many spans of positions attention may treat as tasks of their own (1: each task goes through all of them).
BATCH_ROWS, BATCH_TILES, BATCH_TILE_COUNT, BATCH_SPANS, BATCH_ATTENTION_TASKS = range(5)
BATCH_WORDS = 8
# Words of a tile: its first row, how many rows, the position of the first, and the address of the session's page addresses.
TILE_ROW, TILE_COUNT, TILE_POSITION, TILE_PAGES = range(4)
TILE_WORDS = 4


@intrinsic
def as_pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@njit(**INLINE)
def words(address: int, count: int) -> Any:
    return carray(as_pointer(address), count, np.int64)


@njit(**INLINE)
def floats(address: int, count: int) -> Any:
    return carray(as_pointer(address), count, np.float32)


@njit(**INLINE)
def halfwords(address: int, count: int) -> Any:
    return carray(as_pointer(address), count, np.int16)


@intrinsic
def float_from_bits(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_from_float(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.bitcast(values[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def call_kernel(typing: Any, kernel: Any, arguments: Any, batch: Any, chunk: Any, chunks: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(values[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_add(typing: Any, address: Any, amount: Any) -> Any:
    """Adds and returns what was there before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], I64.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_swap_if(typing: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Writes `desired` where `expected` still stands; says whether it did."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], I64.as_pointer())
        result = builder.cmpxchg(pointer, values[1], values[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(result, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), generate


_DEFAULT_MXCSR = 0x1F80  # to nearest even, subnormals as IEEE has them, no traps


@intrinsic
def enter_ieee(typing: Any) -> Any:
    """Makes this thread compute as IEEE says and returns how it did before: other libraries may have switched subnormals off."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        if "x86" not in str(builder.module.triple):
            return ir.Constant(ir.IntType(32), 0)
        before = _exchange_mxcsr(builder, ir.Constant(ir.IntType(32), _DEFAULT_MXCSR))
        return before

    return types.uint32(), generate


@intrinsic
def leave_ieee(typing: Any, before: Any) -> Any:
    """Gives the thread back the way it was."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        if "x86" in str(builder.module.triple):
            _exchange_mxcsr(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.uint32), generate


def _exchange_mxcsr(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    emitter = Emitter(builder)
    old, new = (cgutils.alloca_once(builder, ir.IntType(32)) for _ in range(2))
    as_bytes = [builder.bitcast(slot, ir.IntType(8).as_pointer()) for slot in (old, new)]
    emitter.call("llvm.x86.sse.stmxcsr", ir.VoidType(), [as_bytes[0]])
    builder.store(value, new)
    emitter.call("llvm.x86.sse.ldmxcsr", ir.VoidType(), [as_bytes[1]])
    return builder.load(old)


@intrinsic
def fence(typing: Any) -> Any:
    """What was written before is seen before what is written after."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def relax(typing: Any) -> Any:
    """Tells the processor that this is a waiting loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        if "x86" in str(builder.module.triple):
            Emitter(builder).call("llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate
