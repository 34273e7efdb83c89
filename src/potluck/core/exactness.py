"""Which arithmetic a shard computes by, as a number that shards must share to be in one pipeline, and what a session may expect of it."""

from typing import Literal

from potluck.core.limits import ARITHMETIC_VERSION

# What a session's numbers depend on beside its own tokens. `bitwise`: nothing. `batch-invariant`: the device and the chunks of its
# own prompt, not on who shared its batches. `tolerance`: on those too, within rounding.
Exactness = Literal["bitwise", "batch-invariant", "tolerance"]

_CUDA = 1000  # a GPU's numbers are those of its kernels: nothing else is to be mixed with them silently
_CUDA_BATCH_INVARIANT = 2000


def arithmetic_of(device: str, *, is_batch_invariant: bool = False) -> int:
    """`device` as in EngineSettings."""
    if device == "cpu":
        return ARITHMETIC_VERSION
    return ARITHMETIC_VERSION + (_CUDA_BATCH_INVARIANT if is_batch_invariant else _CUDA)


def exactness_of(arithmetic: int) -> Exactness:
    if arithmetic < _CUDA:
        return "bitwise"
    return "tolerance" if arithmetic < _CUDA_BATCH_INVARIANT else "batch-invariant"
