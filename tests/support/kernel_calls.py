"""Runs single kernels the way the scheduler would, chunk by chunk, on plain numpy arrays."""

import ctypes

import numpy as np
import numpy.typing as npt
from numba import njit

from potluck.engine.decoder import _Product, add_matmul
from potluck.engine.kernels.library import KernelLibrary
from potluck.engine.kernels.memory import BATCH_ROWS, BATCH_WORDS
from potluck.engine.kernels.processor import PROCESSORS, detect
from potluck.engine.kernels.rows import quantise_row
from potluck.engine.kernels.schedule import ARGUMENTS_AT, KERNEL_AT
from potluck.engine.packed_cache import PackedCache, PackedTensor
from potluck.engine.program import Activations, Program
from tests.support.memory_checkpoint import matrix_checkpoint
from tests.support.random_weights import Bytes

Floats = npt.NDArray[np.float32]

# From the fastest to the one that runs anywhere; what this machine detects, it and all slower ones can run.
RUNNABLE = tuple(PROCESSORS)[tuple(PROCESSORS).index(detect()) :]
_LIBRARIES = {name: KernelLibrary(name) for name in RUNNABLE}

_Kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def library_for(processor: str) -> KernelLibrary:
    """One library per processor for the whole test run, so that a kernel is compiled at most once."""
    return _LIBRARIES[processor]


def packed(format_name: str, raw: Bytes, columns: int) -> PackedTensor:
    return PackedCache(None, "test").load(matrix_checkpoint(format_name, raw, columns), "unit", ["matrix"])["matrix"]


@njit(cache=True, error_model="numpy")
def _quantise_rows(words: npt.NDArray[np.int64], count: int) -> None:
    for row in range(count):
        quantise_row(words, row)


def activations_of(x: Floats, *, is_quantised: bool) -> Activations:
    """Rows as a product reads them, rounded to int8 by the real kernel where asked."""
    activations = Activations(len(x), x.shape[1], is_quantised=is_quantised)
    activations.values[: len(x), : x.shape[1]] = x
    if is_quantised:
        _quantise_rows(activations.words, len(x))
    return activations


def run_program(program: Program, rows: int, chunks: int = 1) -> None:
    """Every operation after the other, each cut into `chunks`, the last chunk first."""
    batch = np.zeros(BATCH_WORDS, np.int64)
    batch[BATCH_ROWS] = rows
    for operation in program.table:
        kernel = _Kernel(int(operation[KERNEL_AT]))
        for chunk in reversed(range(chunks)):
            kernel(int(operation[ARGUMENTS_AT]), batch.ctypes.data, chunk, chunks)


def multiply(tensor: PackedTensor, x: Floats, processor: str, chunks: int = 1) -> Floats:
    """x times the packed matrix, (tokens, rows), by the kernel for `processor`."""
    source = activations_of(x, is_quantised=tensor.layout.name not in ("F32", "F16", "BF16"))
    target = _Product(len(x), tensor.rows)
    target.values[:] = np.float32(np.nan)
    program = Program()
    add_matmul(program, library_for(processor), tensor, source, target)
    program.seal()
    run_program(program, len(x), chunks)
    return target.values[: len(x), : tensor.rows].copy()
