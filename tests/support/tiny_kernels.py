"""A kernel that shows at once when a chunk was left out, done twice, or done before the phase in front of it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import cfunc

from potluck.engine.kernels.memory import KERNEL, KERNEL_OPTIONS, words
from potluck.engine.program import Program

Words = npt.NDArray[np.int64]


@cfunc(KERNEL, **KERNEL_OPTIONS)
def _mix(arguments, batch, chunk, chunks):  # type: ignore[no-untyped-def]
    """target[i] = 5 · target[i] + source[n - 1 - i] + 1, so that neither order nor number of visits can be mistaken."""
    a = words(arguments, 3)
    count = a[2]
    source = words(a[0], count)
    target = words(a[1], count)
    for i in range(count * chunk // chunks, count * (chunk + 1) // chunks):
        target[i] = 5 * target[i] + source[count - 1 - i] + 1


class Mixing(NamedTuple):
    """One operation: which arrays it reads and writes, and whether it may run beside the one before."""

    source: int
    target: int
    is_beside_previous: bool


class MixingProgram:
    """A program of mixing operations over a few arrays, and what it should leave in them."""

    def __init__(self, operations: list[Mixing], policies: list[int], arrays: int, count: int) -> None:
        self.arrays = np.zeros((arrays, count), np.int64)
        self.wanted = np.zeros((arrays, count), np.int64)
        self._operations = operations
        self.program = Program()
        for operation, policy in zip(operations, policies, strict=True):
            addresses = (self.arrays[operation.source].ctypes.data, self.arrays[operation.target].ctypes.data)
            self.program.add(
                _mix.address, (*addresses, count), policy=policy, units=count,
                is_beside_previous=operation.is_beside_previous,
            )  # fmt: skip
        self.program.seal()

    def fill(self, rng: np.random.Generator) -> None:
        self.arrays[:] = rng.integers(0, 1000, self.arrays.shape)
        self.wanted[:] = self.arrays
        with np.errstate(over="ignore"):
            for source, target, _ in self._operations:
                self.wanted[target] = 5 * self.wanted[target] + self.wanted[source][::-1] + 1
