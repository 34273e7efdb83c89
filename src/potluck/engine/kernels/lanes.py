"""A thin way to write LLVM vector code: `Lanes` are vectors with operators, `Emitter` makes them. Knows nothing of models.

numba promotes small integers to 64 bits and will not vectorise what we need, so the hot loops are emitted as LLVM vectors
inside `numba.extending.intrinsic`. Nothing here sets fast-math flags: every operation is one IEEE operation, in the order
written, on every machine. LLVM splits wide vectors where the processor's registers are narrower.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
USED_ONCE = 4  # of levels of caches: none, as far as the processor can do that


def vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


class Lanes:
    """A vector (or scalar) value. `+ - * & | ^ << >>` act lane by lane; `>>` shifts zeros in."""

    def __init__(self, emitter: "Emitter", value: ir.Value) -> None:
        self.emitter = emitter
        self.value = value

    @property
    def type(self) -> ir.Type:
        return self.value.type

    @property
    def count(self) -> int:
        return int(self.type.count)

    @property
    def is_float(self) -> bool:
        return isinstance(getattr(self.type, "element", self.type), ir.FloatType)

    def _apply(self, other: "Lanes", on_float: str | None, on_integer: str) -> "Lanes":
        name = on_float if self.is_float and on_float else on_integer
        return Lanes(self.emitter, getattr(self.emitter.builder, name)(self.value, other.value))

    def __add__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, "fadd", "add")

    def __sub__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, "fsub", "sub")

    def __mul__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, "fmul", "mul")

    def __truediv__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, "fdiv", "udiv")

    def __and__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, None, "and_")

    def __or__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, None, "or_")

    def __xor__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, None, "xor")

    def __lshift__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, None, "shl")

    def __rshift__(self, other: "Lanes") -> "Lanes":
        return self._apply(other, None, "lshr")

    def to_float(self) -> "Lanes":
        """Signed integers to float32 (exact below 2**24)."""
        return Lanes(self.emitter, self.emitter.builder.sitofp(self.value, vector(F32, self.count)))

    def widen(self, element: ir.Type, *, signed: bool) -> "Lanes":
        builder = self.emitter.builder
        extend = builder.sext if signed else builder.zext
        return Lanes(self.emitter, extend(self.value, vector(element, self.count)))

    def view(self, target: ir.Type) -> "Lanes":
        """The same bits as another type of the same size."""
        return Lanes(self.emitter, self.emitter.builder.bitcast(self.value, target))

    def pick(self, indices: Sequence[int]) -> "Lanes":
        mask = ir.Constant(vector(I32, len(indices)), list(indices))
        undefined = ir.Constant(self.type, ir.Undefined)
        return Lanes(self.emitter, self.emitter.builder.shuffle_vector(self.value, undefined, mask))

    def join(self, other: "Lanes") -> "Lanes":
        """Both vectors, one after the other."""
        mask = ir.Constant(vector(I32, self.count + other.count), list(range(self.count + other.count)))
        return Lanes(self.emitter, self.emitter.builder.shuffle_vector(self.value, other.value, mask))

    def less(self, other: "Lanes") -> "Lanes":
        """True where self < other; false where either is not a number."""
        return Lanes(self.emitter, self.emitter.builder.fcmp_ordered("<", self.value, other.value))

    def choose(self, yes: "Lanes", no: "Lanes") -> "Lanes":
        return Lanes(self.emitter, self.emitter.builder.select(self.value, yes.value, no.value))


class Variable:
    """A mutable value in a loop; LLVM turns it into a register."""

    def __init__(self, emitter: "Emitter", initial: Lanes) -> None:
        self._emitter = emitter
        self._slot = cgutils.alloca_once(emitter.builder, initial.type)
        self.set(initial)

    def get(self) -> Lanes:
        return Lanes(self._emitter, self._emitter.builder.load(self._slot))

    def set(self, value: Lanes) -> None:
        self._emitter.builder.store(value.value, self._slot)


class Emitter:
    """Makes Lanes at the builder's current place. Addresses are 64-bit integers."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def integer(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def add(self, left: ir.Value, right: ir.Value | int) -> ir.Value:
        return self.builder.add(left, self.integer(right) if isinstance(right, int) else right)

    def mul(self, left: ir.Value, right: ir.Value | int) -> ir.Value:
        return self.builder.mul(left, self.integer(right) if isinstance(right, int) else right)

    def splat_constant(self, element: ir.Type, count: int, value: float) -> Lanes:
        return Lanes(self, ir.Constant(vector(element, count), [value] * count))

    def floats(self, value: float, count: int) -> Lanes:
        return self.splat_constant(F32, count, value)

    def load(self, target: ir.Type, address: ir.Value, offset: ir.Value | int = 0) -> Lanes:
        return Lanes(self, self._load(target, self.add(address, offset)))

    def _load(self, target: ir.Type, address: ir.Value) -> ir.Value:
        loaded = self.builder.load(self.builder.inttoptr(address, target.as_pointer()))
        loaded.align = 1  # callers keep things aligned for speed, not for correctness
        return loaded

    def broadcast(self, element: ir.Type, count: int, address: ir.Value, offset: ir.Value | int = 0) -> Lanes:
        """One element from memory in every lane."""
        return self.spread(self._load(element, self.add(address, offset)), count)

    def spread(self, scalar: ir.Value, count: int) -> Lanes:
        undefined = ir.Constant(vector(scalar.type, count), ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, I32(0))
        zeros = ir.Constant(vector(I32, count), [0] * count)
        return Lanes(self, self.builder.shuffle_vector(single, undefined, zeros))

    def store(self, lanes: Lanes, address: ir.Value, offset: ir.Value | int = 0) -> None:
        pointer = self.builder.inttoptr(self.add(address, offset), lanes.type.as_pointer())
        self.builder.store(lanes.value, pointer).align = 1

    def room(self, size_bytes: int) -> ir.Value:
        """The address of some memory of the kernel's own."""
        slot = cgutils.alloca_once(self.builder, ir.ArrayType(I8, size_bytes))
        slot.align = 64
        return self.builder.ptrtoint(slot, I64)

    def prefetch(self, address: ir.Value, offset: int, level: int) -> None:
        """`level`: the cache, 1 to 3, or USED_ONCE."""
        pointer = self.builder.inttoptr(self.add(address, offset), I8.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(4 - level), I32(1)])

    def call(self, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), list(arguments))

    def intrinsic(self, name: str, result: ir.Type, *arguments: Lanes) -> Lanes:
        return Lanes(self, self.call(name, result, [argument.value for argument in arguments]))

    def loop(self, count: ir.Value, body: Callable[[ir.Value], Any]) -> None:
        with cgutils.for_range(self.builder, count, intp=I64) as loop:
            body(loop.index)

    def variable(self, initial: Lanes) -> Variable:
        return Variable(self, initial)
