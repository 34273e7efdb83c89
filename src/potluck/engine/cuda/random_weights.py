"""Random weights made on the device, at the rate of its memory: the same seed, shape and device give the same numbers."""

import zlib

import torch

from potluck.engine.cuda.matrices import BLOCK_KINDS, BlockMatrix, DenseMatrix, Matrix
from potluck.weights.random_checkpoint import RandomCheckpoint

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16}


class RandomSource:
    """A row's product with a normalised vector is about as large as the vector; norms are one, biases small."""

    def __init__(self, checkpoint: RandomCheckpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._checkpoint.seed)

    def vector(self, name: str) -> torch.Tensor | None:
        if name not in self._checkpoint.tensors:
            return None
        size = self._checkpoint.tensors[name].shape[0]
        if name.endswith("norm"):
            return torch.ones(size, device=self._device)
        return torch.randn(size, generator=self._generator(name), device=self._device) * 0.02

    def matrix(self, name: str) -> Matrix:
        entry = self._checkpoint.tensors[name]
        rows, columns = entry.shape
        spread = 1.0 if name == "embedding" else columns**-0.5
        generator = self._generator(name)
        if entry.format in _FLOATS:
            weight = torch.empty((rows, columns), dtype=_FLOATS[entry.format], device=self._device)
            return DenseMatrix(weight.normal_(0.0, spread, generator=generator))
        return self._blocks(entry.format, rows, columns, spread, generator)

    def _blocks(
        self, format_name: str, rows: int, columns: int, spread: float, generator: torch.Generator
    ) -> BlockMatrix:
        kind, bits, zero = BLOCK_KINDS[format_name]
        device = self._device
        low, high = (-(2**31), 2**31) if bits == 4 else (-127, 128)
        size = (rows, columns // 8) if bits == 4 else (rows, columns)
        dtype = torch.int32 if bits == 4 else torch.int8
        quants = torch.randint(low, high, size, generator=generator, device=device, dtype=dtype)
        deviation = 4.6 if bits == 4 else 73.0
        groups = columns // 32
        if kind == "plain":
            scales = torch.full((rows, groups), spread / deviation, dtype=torch.float16, device=device)
            return BlockMatrix(quants, scales, None, kind, bits, zero, columns)
        sub = torch.full((rows, groups, 2), 32, dtype=torch.uint8, device=device)
        step = spread / deviation / 32
        pair = torch.tensor([step, 7.5 * step], dtype=torch.float16, device=device)
        return BlockMatrix(quants, sub, pair.expand(rows, columns // 256, 2).contiguous(), kind, bits, zero, columns)
