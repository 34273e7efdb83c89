"""The device: whether it is there, what is free on it, and what a shard takes. Errors of torch become ours here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from potluck.core.device_facts import RESERVE_BYTES, DeviceFacts
from potluck.core.errors import DeviceUnavailable, OutOfDeviceMemory
from potluck.engine.cuda.ceilings import copy_bandwidth

_PROBE_BYTES = 256 << 20
_HOST_BYTES_PER_S = 8e9  # of torch on a CPU, which nobody uses for its speed


def find_device(name: str) -> torch.device:
    """Raises DeviceUnavailable with the reason."""
    if name == "cuda:torch-cpu":  # the same code without a GPU, for tests
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceUnavailable("torch finds no usable NVIDIA GPU here")
    device = torch.device(name if ":" in name else "cuda:0")
    if device.index is None or device.index >= torch.cuda.device_count():
        raise DeviceUnavailable(f"there is no {name}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "torch on the CPU"


def measure(name: str) -> DeviceFacts:
    """What is free on it now, and how fast it copies. Raises DeviceUnavailable."""
    device = find_device(name)
    free_bytes, total_bytes = memory_of(device)
    speed = copy_bandwidth(device, _PROBE_BYTES) if device.type == "cuda" else _HOST_BYTES_PER_S
    return DeviceFacts(name, describe(device), total_bytes, free_bytes, speed)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Free and total."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return int(free_bytes), int(total_bytes)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def kv_budget(
    device: torch.device, weight_bytes: int, wanted_bytes: int, least_bytes: int, budget_bytes: int | None
) -> int:
    """What keys and values may take beside the weights, at most `wanted_bytes`. `budget_bytes`: for both, as the owner allows.

    Raises OutOfDeviceMemory where nothing is left, before anything is loaded.
    """
    free_bytes, total_bytes = memory_of(device)
    reserve = RESERVE_BYTES if device.type == "cuda" else 0
    left = free_bytes - weight_bytes - reserve
    needs = f"{_mib(weight_bytes)} of weights, {_mib(least_bytes)} of KV cache"
    if left < least_bytes:
        raise OutOfDeviceMemory(
            f"{needs} and a reserve of {_mib(reserve)} do not fit into the {_mib(free_bytes)} that are free of "
            f"{_mib(total_bytes)} on {describe(device)}"
        )
    if budget_bytes is not None and budget_bytes - weight_bytes < least_bytes:
        raise OutOfDeviceMemory(
            f"{needs} do not fit into the {_mib(max(0, budget_bytes))} that are left of what shards may take on {describe(device)}"
        )
    return min(wanted_bytes, left, left if budget_bytes is None else budget_bytes - weight_bytes)


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // (1 << 20))} MiB"


@contextmanager
def typed_errors() -> Iterator[None]:
    """While something is loaded: running out of memory is an error of ours. In the middle of a batch it ends the worker."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfDeviceMemory("the GPU has no room for these layers") from error
