"""How a node's API uses pipelines, as the configuration file says: what `potluck up` and `potluck join` have in common."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from potluck.gateway.server import GatewaySettings
    from potluck.node.answering import OwnLayers
    from potluck.orchestrator.orchestrator import PipelineOrchestrator
    from potluck.orchestrator.params import DistributedChatParams
    from potluck.weights.store import ModelStore

_MORE_LAYERS_THAN_ANY = 100_000  # a range has five digits at most


def api_params(holder_wait_s: float) -> "DistributedChatParams":
    """`holder_wait_s`: how long a stream stays open where nobody holds some layers."""
    from potluck.node.configuration_file import read_configuration
    from potluck.orchestrator.params import DistributedChatParams
    from potluck.orchestrator.request import GenerationSettings

    configuration = read_configuration()
    return DistributedChatParams(
        allow_self_as_shard=configuration.allow_self_as_shard,
        settings=GenerationSettings(
            holder_wait_s=holder_wait_s, stall_timeout_s=configuration.shard_health_timeout_seconds, keeps_kv=True
        ),
        fallback_to_local=configuration.fallback_to_local,
        max_shards_per_request=configuration.max_shards_per_request,
        activation_dtype=configuration.activation_dtype,
    )


def require_own_layers_like(text: str) -> None:
    """Raises BadRequest for what are own layers of no model, however many layers it has."""
    require_own_layers_fit(text, [_MORE_LAYERS_THAN_ANY])


def require_own_layers_fit(text: str | None, layer_counts: Sequence[int]) -> None:
    """Raises BadRequest where they fit none of the models that are known; where none is known yet, nothing can be said."""
    from potluck.node.serving import parse_own_layers

    complaint = ""
    for layer_count in () if text is None else layer_counts:
        try:
            parse_own_layers(text or "", layer_count)
        except BadRequest as error:
            complaint = str(error)
        else:
            return
    if complaint:
        raise BadRequest(f"--own-layers: {complaint}")


def own_layers_of(text: str | None, store: "ModelStore", threads: int) -> "OwnLayers | None":
    from potluck.node.answering import OwnLayers
    from potluck.node.serving import ServingSettings

    return None if text is None else OwnLayers(text, store, ServingSettings(threads=threads))


def configure_orchestrator(orchestrator: "PipelineOrchestrator", settings: "GatewaySettings") -> "GatewaySettings":
    """The health time-out; and where the file names `max_concurrent_pipelines`, an API in whose queue requests wait for one."""
    import msgspec

    from potluck.node.configuration_file import configured_keys, read_configuration
    from potluck.orchestrator.router import ShardHealthTracker

    orchestrator.health = ShardHealthTracker(read_configuration().shard_health_timeout_seconds)
    if "max_concurrent_pipelines" not in configured_keys():
        return settings
    most = read_configuration().max_concurrent_pipelines
    orchestrator.max_concurrent_pipelines = most
    admission = settings.service.admission
    fewer = msgspec.structs.replace(
        admission, max_concurrent_requests=min(admission.max_concurrent_requests, most), max_sessions=most
    )
    return msgspec.structs.replace(settings, service=msgspec.structs.replace(settings.service, admission=fewer))
