"""Which engine computes on which device, and what a device has to give. Imports an engine only when one is built: a CPU node never
imports torch.
"""

from potluck.core.device_facts import DeviceFacts
from potluck.core.errors import BadRequest
from potluck.engine.shard_engine import EngineSettings, Notice, ShardEngine
from potluck.weights.checkpoint import Checkpoint


def build_engine(checkpoint: Checkpoint, settings: EngineSettings, notice: Notice | None = None) -> ShardEngine:
    """Raises BadRequest for a device that nobody knows, DeviceUnavailable for one that is not there."""
    kind = settings.device.partition(":")[0]
    if kind == "cpu":
        from potluck.engine.cpu_engine import CpuEngine

        return CpuEngine(checkpoint, settings, notice)
    if kind == "cuda":
        from potluck.engine.cuda.engine import TorchEngine

        return TorchEngine(checkpoint, settings, notice)
    raise _unknown(settings.device)


def measure_device(device: str) -> DeviceFacts:
    """Raises BadRequest for a device that nobody knows or that is the CPU, DeviceUnavailable for one that is not there."""
    if device.partition(":")[0] != "cuda":
        raise _unknown(device)
    from potluck.engine.cuda.device import measure

    return measure(device)


def _unknown(device: str) -> BadRequest:
    return BadRequest(f"there is no device {device!r}; known: cpu, cuda, cuda:N")
