"""The device: whether it is there, what is free on it, and what a shard takes. Errors of torch become ours here."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from potluck.core.errors import DeviceUnavailable, OutOfDeviceMemory

RESERVE_BYTES = 1 << 30  # the driver's own, workspaces, graphs, buffers of a chunk


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


def kv_budget(device: torch.device, weight_bytes: int, wanted_bytes: int, least_bytes: int) -> int:
    """What keys and values may take beside the weights, at most `wanted_bytes`. Raises OutOfDeviceMemory where nothing is left."""
    if device.type != "cuda":
        return wanted_bytes
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    left = free_bytes - weight_bytes - RESERVE_BYTES
    if left < least_bytes:
        raise OutOfDeviceMemory(
            f"{weight_bytes >> 20} MiB of weights, {least_bytes >> 20} MiB of KV cache and a reserve of {RESERVE_BYTES >> 20} MiB "
            f"do not fit into the {free_bytes >> 20} MiB that are free of {total_bytes >> 20} on {describe(device)}"
        )
    return min(wanted_bytes, left)


@contextmanager
def typed_errors() -> Iterator[None]:
    """While something is loaded: running out of memory is an error of ours. In the middle of a batch it ends the worker."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfDeviceMemory("the GPU has no room for these layers") from error
