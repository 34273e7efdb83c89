"""The device that this node computes on, asked in a process of its own: daemons import neither torch nor the engine."""

import signal
import subprocess
import sys

import msgspec

from potluck.core.device_facts import DeviceFacts
from potluck.core.errors import DeviceUnavailable
from potluck.shard.worker_process import worker_environment

_MODULE = "potluck.worker.device_probe"
_PATIENCE_S = 180.0  # a first import of torch from a slow disk


class ProbeInterrupted(DeviceUnavailable):
    """Nothing is known of the device: Ctrl-C at the terminal ended the process that looked."""


def measured_device(device: str) -> DeviceFacts:
    """Takes some seconds. Raises DeviceUnavailable with the reason, ProbeInterrupted where there is none."""
    command = [sys.executable, "-P", "-m", _MODULE, device]
    try:
        done = subprocess.run(
            command, capture_output=True, env=worker_environment(), timeout=_PATIENCE_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DeviceUnavailable(f"{device} did not answer within {_PATIENCE_S:.0f} s") from None
    if done.returncode == -signal.SIGINT:
        raise ProbeInterrupted(f"looking at {device} was interrupted")
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DeviceUnavailable(" ".join(reason) or f"{device} cannot be used")
    try:
        return msgspec.json.decode(done.stdout, type=DeviceFacts)
    except msgspec.DecodeError:
        raise DeviceUnavailable(f"what {device} says of itself cannot be read") from None
