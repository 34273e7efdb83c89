"""Programs for the scheduler: operations with their arguments, and the buffers that they read and write. Knows no model."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.engine.kernels.layout import BLOCK
from potluck.engine.kernels.processor import LARGEST_TILE
from potluck.engine.kernels.rows import ROWS_WORDS
from potluck.engine.kernels.schedule import OPERATION_WORDS, SYNC_WORDS

Words = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def aligned_floats(*shape: int) -> Floats:
    """Zeros that start on a cache line."""
    count = int(np.prod(shape))
    raw = np.zeros(count + 16, np.float32)
    skip = -(raw.ctypes.data // 4) % 16
    return raw[skip : skip + count].reshape(shape)


def padded_to(multiple: int, count: int) -> int:
    return -(-count // multiple) * multiple


class Activations:
    """Rows that a product reads, in whole tiles: float32 and, where some consumer is quantised, int8 with scales and sums."""

    def __init__(self, rows: int, columns: int, *, is_quantised: bool) -> None:
        rows = padded_to(LARGEST_TILE, rows)
        padded = padded_to(BLOCK, columns)
        self.values = aligned_floats(rows, padded)
        held = rows if is_quantised else 0
        self.q = np.zeros((held, padded), np.int8)
        self.d = np.zeros((held, padded // BLOCK), np.float32)
        self.s = np.zeros((held, padded // BLOCK), np.float32)
        self.sums = np.zeros((held, padded // BLOCK, 2), np.int32)
        arrays = (self.values, self.q, self.d, self.s, self.sums)
        self.words = np.array([*(a.ctypes.data for a in arrays), columns, padded, int(is_quantised)], np.int64)
        assert len(self.words) == ROWS_WORDS

    @property
    def address(self) -> int:
        """Where the kernels find the description."""
        return int(self.words.ctypes.data)


class Program:
    """A list of operations; `seal` fixes it in memory. Arguments may be changed afterwards through the returned arrays."""

    def __init__(self) -> None:
        self._operations: list[tuple[int, Words, int, int, bool]] = []
        self.table: Words = np.zeros(0, np.int64)
        self.sync: Words = np.zeros(0, np.int64)
        self.table_address = self.sync_address = 0  # asking numpy for them costs more than many a kernel
        self.length = 0

    def add(
        self, kernel: int, arguments: Sequence[int], *, policy: int, units: int = 0, is_beside_previous: bool = False
    ) -> Words:
        """Appends an operation; one that is beside its predecessor does not wait for it. Returns its arguments."""
        words = np.array(arguments, np.int64)
        self._operations.append((kernel, words, policy, units, not is_beside_previous))
        return words

    def seal(self) -> None:
        self.table = np.zeros((len(self._operations), OPERATION_WORDS), np.int64)
        for row, (kernel, words, policy, units, starts_phase) in zip(self.table, self._operations, strict=True):
            row[:] = (kernel, words.ctypes.data, policy, units, int(starts_phase))
        self.sync = np.zeros((len(self._operations), SYNC_WORDS), np.int64)
        self.length = len(self._operations)
        self.table_address, self.sync_address = int(self.table.ctypes.data), int(self.sync.ctypes.data)

    def __len__(self) -> int:
        return len(self._operations)
