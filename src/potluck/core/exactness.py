"""Which arithmetic a shard computes by, as a number that OPEN names, and what an answer may expect of those that took part in it.

CPU shards of one version compute the same bits. A GPU's numbers are those of its kernels, so each kind has a number of its own.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from potluck.core.limits import ARITHMETIC_VERSION

# What a session's numbers depend on beside its own tokens. `bitwise`: nothing. `batch-invariant`: the device and the chunks of its
# own prompt, not on who shared its batches. `tolerance`: on those too, within rounding. `mixed`: on which layers were computed by
# which kind of device as well, because several kinds took part, side by side or one after the other.
Exactness = Literal["bitwise", "batch-invariant", "tolerance", "mixed"]

_LEVELS: tuple[Exactness, ...] = ("bitwise", "batch-invariant", "tolerance", "mixed")  # the strongest first
_CUDA = 1000
_CUDA_BATCH_INVARIANT = 2000
KNOWN_ARITHMETICS = (ARITHMETIC_VERSION, ARITHMETIC_VERSION + _CUDA, ARITHMETIC_VERSION + _CUDA_BATCH_INVARIANT)


def arithmetic_of(device: str, *, is_batch_invariant: bool = False) -> int:
    """`device` as in EngineSettings."""
    if device == "cpu":
        return ARITHMETIC_VERSION
    return ARITHMETIC_VERSION + (_CUDA_BATCH_INVARIANT if is_batch_invariant else _CUDA)


def exactness_of(arithmetics: Collection[int], failovers: int = 0) -> Exactness:
    """Of an answer in which shards of these arithmetics took part.

    On a GPU what a failover recomputes in chunks was computed token by token before, so that only rounding is promised then.
    """
    if len(set(arithmetics)) > 1:
        return "mixed"
    level = _level_of(next(iter(arithmetics), ARITHMETIC_VERSION))
    return "tolerance" if level == "batch-invariant" and failovers else level


def weakest(levels: Iterable[Exactness]) -> Exactness:
    return max(levels, key=_LEVELS.index, default="bitwise")


def _level_of(arithmetic: int) -> Exactness:
    if arithmetic < _CUDA:
        return "bitwise"
    return "tolerance" if arithmetic < _CUDA_BATCH_INVARIANT else "batch-invariant"
