"""Which engine computes on which device. Imports an engine only when one is built: a CPU node never imports torch."""

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
    raise BadRequest(f"there is no device {settings.device!r}; known: cpu, cuda, cuda:N")
