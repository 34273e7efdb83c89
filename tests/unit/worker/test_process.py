"""How a worker says what it died of. Without a process."""

import errno

import pytest

from potluck.wire.worker_settings import OUT_OF_MEMORY_STATUS
from potluck.worker.process import exit_status


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class ArrayMemoryError(MemoryError):
    pass


@pytest.mark.parametrize(
    "error", [MemoryError(), ArrayMemoryError(), OSError(errno.ENOMEM, "no memory"), OutOfMemoryError("CUDA")]
)
def test_running_out_of_memory_has_an_exit_status_of_its_own(error: Exception) -> None:
    assert exit_status(error) == OUT_OF_MEMORY_STATUS


@pytest.mark.parametrize("error", [RuntimeError(), OSError(errno.ENOSPC, "no room"), KeyError("x")])
def test_anything_else_is_a_bug(error: Exception) -> None:
    assert exit_status(error) == 70
