"""Potluck runs one language model across several people's computers.

The names below are imported when they are first used, so that `import potluck` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from potluck.client import AsyncClient, Client
    from potluck.core.shard_health import ShardHealth
    from potluck.orchestrator.frames import StreamFrame
    from potluck.orchestrator.orchestrator import PipelineOrchestrator
    from potluck.orchestrator.params import DistributedChatParams
    from potluck.orchestrator.router import Pipeline, ShardDescriptor, ShardHealthTracker, ShardRouter
    from potluck.orchestrator.routing import ShardStore
    from potluck.shard.server import ShardServer
    from potluck.shard.settings import ShardSettings

_HOMES = {
    "AsyncClient": "potluck.client",
    "Client": "potluck.client",
    "DistributedChatParams": "potluck.orchestrator.params",
    "Pipeline": "potluck.orchestrator.router",
    "PipelineOrchestrator": "potluck.orchestrator.orchestrator",
    "ShardDescriptor": "potluck.orchestrator.router",
    "ShardHealth": "potluck.core.shard_health",
    "ShardHealthTracker": "potluck.orchestrator.router",
    "ShardRouter": "potluck.orchestrator.router",
    "ShardServer": "potluck.shard.server",
    "ShardSettings": "potluck.shard.settings",
    "ShardStore": "potluck.orchestrator.routing",
    "StreamFrame": "potluck.orchestrator.frames",
}

__all__ = [
    "AsyncClient",
    "Client",
    "DistributedChatParams",
    "Pipeline",
    "PipelineOrchestrator",
    "ShardDescriptor",
    "ShardHealth",
    "ShardHealthTracker",
    "ShardRouter",
    "ShardServer",
    "ShardSettings",
    "ShardStore",
    "StreamFrame",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'potluck' has no attribute {name!r}")
