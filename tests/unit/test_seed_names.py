"""The names that the seeds fix, as tables: that each is there, under that name, with that default. What they do is tested where they live.

HearthNet's sections are named; where a value differs from the seed's, docs/adr/0005 says why.
"""

import inspect
import re
import typing
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

import potluck
from potluck.core import errors, limits
from potluck.core.configuration import DistributedSettings, HostSettings, parse_configuration
from potluck.gateway.admission import AdmissionSettings, Tier
from potluck.orchestrator import frames
from potluck.orchestrator.request import GenerationSettings
from potluck.orchestrator.router import RoutingSettings
from potluck.shard.settings import ShardSettings
from potluck.telemetry.metrics import Metrics

DIFFERENCES = Path(__file__).parents[2] / "docs" / "adr" / "0005-where-the-design-differs-from-hearthnet.md"

# ---------------------------------------------------------------- §4: classes, their fields and methods

FIELDS = {
    "ShardDescriptor": [
        "shard_id", "model_id", "weights_sha256", "layer_range", "vram_required_mb", "max_concurrent_streams", "host", "endpoint",
        "advertised_at",
    ],
    "Pipeline": ["pipeline_id", "model_id", "weights_sha256", "total_layers", "ordered_shards", "established_at"],
    "ShardHealth": ["shard_id", "online", "last_seen", "p95_latency_ms", "queue_depth"],
}  # fmt: skip
METHODS = {
    "ShardServer": {"start": [], "forward": ["activations_in"], "health": [], "evict": []},
    "PipelineOrchestrator": {"chat": ["request", "params"]},
    "ShardRouter": {"pick": ["model_id", "weights_sha256"], "repick": ["pipeline", "exclude"]},
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_dataclass_has_its_fields(name: str) -> None:
    kind = getattr(potluck, name)
    named = (
        msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else fields(kind)
    )
    assert [field.name for field in named] == FIELDS[name]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_asynchronous_and_begins_with_its_parameters(name: str) -> None:
    for method, parameters in METHODS[name].items():
        function = getattr(getattr(potluck, name), method)
        assert inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function), method
        assert list(inspect.signature(function).parameters)[1 : 1 + len(parameters)] == parameters


def test_the_other_classes_are_there() -> None:
    for name in ("DistributedChatParams", "ShardSettings", "ShardStore", "ShardHealthTracker", "StreamFrame"):
        assert hasattr(potluck, name)
    assert potluck.DistributedChatParams().fallback_to_local  # type: ignore[attr-defined]
    assert RoutingSettings() == RoutingSettings(max_shards_per_request=16, allow_self_as_shard=False)


# ---------------------------------------------------------------- §5: constants, frames, metrics

CONSTANTS = {
    "DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S": 30,
    "DISTRIBUTED_FALLBACK_TO_LOCAL_AFTER_FAILURES": 2,
    "TENSOR_CHUNK_BYTES": 1 << 20,
    "TENSOR_FLOW_CONTROL_WINDOW": 16,
}


def test_every_constant_has_its_value_and_is_the_default_of_what_it_is_for() -> None:
    assert {name: getattr(limits, name) for name in CONSTANTS} == CONSTANTS
    assert GenerationSettings().stall_timeout_s == limits.DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S
    assert GenerationSettings().fallback_after == limits.DISTRIBUTED_FALLBACK_TO_LOCAL_AFTER_FAILURES


FRAMES = {
    "token_delta": ["token", "position", "logprob", "top"],
    "prompt_logprobs": ["positions"],
    "shard_status": ["shard_id", "node", "status", "reason", "code"],
    "shard_failover": ["lost", "replaced_by", "epoch", "pause_ms", "replayed_tokens", "method", "exactness"],
    "pipeline_aborted": ["code", "message", "generated_tokens"],
    "finished": ["reason", "generated_tokens", "failovers", "exactness", "reused_tokens"],
}


def test_every_frame_has_its_type_and_fields() -> None:
    kinds = {str(kind.__struct_config__.tag): kind for kind in typing.get_args(frames.StreamFrame)}
    assert {tag: [field.name for field in msgspec.structs.fields(kind)] for tag, kind in kinds.items()} == FRAMES
    degraded = frames.ShardStatus("n:0-7", "00", "degraded")
    assert msgspec.json.decode(msgspec.json.encode(degraded))["status"] == "degraded"


METRICS = {
    "pipeline_construct_ms": ("histogram", ()),
    "first_token_ms": ("histogram", ()),
    "tokens_per_second": ("gauge", ()),
    "shard_latency_ms": ("histogram", ("shard_id",)),
    "failovers_total": ("counter", ()),
    "fallback_to_local_total": ("counter", ()),
    "shard_corruption_detected_total": ("counter", ("node",)),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_on_the_page_with_its_type_and_labels(name: str) -> None:
    kind, labels = METRICS[name]
    metrics = Metrics()
    known = metrics.registry._names_to_collectors[f"distributed_inference_{name}"]
    assert (known._type, known._labelnames) == (kind, labels)  # type: ignore[attr-defined]
    assert f"# TYPE distributed_inference_{name} {kind}" in metrics.page().decode()


# ---------------------------------------------------------------- §6: codes

CODES = {
    "experimental_disabled": errors.ExperimentalDisabled,
    "shard_unavailable": errors.ShardUnavailable,
    "pipeline_stalled": errors.PipelineStalled,
    "weights_mismatch": errors.WeightsMismatch,
    "bad_request": errors.BadRequest,
}


def test_every_code_is_an_error() -> None:
    assert {kind.code: kind for kind in CODES.values()} == CODES


# ---------------------------------------------------------------- §7: configuration

KEYS = {
    "enabled": False,
    "backend": "small_model_layered",
    "max_shards_per_request": 16,
    "shard_health_timeout_seconds": 30,
    "fallback_to_local": True,
    "activation_dtype": "auto",  # HearthNet: fp16
    "allow_self_as_shard": False,
    "max_concurrent_pipelines": 4,
}
HOST_KEYS = {"serve_shards": False, "shard_eviction_idle_seconds": 600, "shard_max_vram_mb": 20_000}


def test_every_key_has_its_default() -> None:
    found = msgspec.structs.asdict(DistributedSettings())
    assert msgspec.structs.asdict(found.pop("host")) == HOST_KEYS
    assert found == KEYS
    assert msgspec.structs.asdict(HostSettings()) == HOST_KEYS


def test_hearthnets_own_file_is_taken_as_it_is_written_there() -> None:
    file = """
    [research.distributed_inference]
    enabled                       = false
    backend                       = "small_model_layered"
    max_shards_per_request        = 16
    shard_health_timeout_seconds  = 30
    fallback_to_local             = true
    activation_dtype              = "fp16"   # "fp16" | "fp32"
    allow_self_as_shard           = false
    max_concurrent_pipelines      = 4

    [research.distributed_inference.host]
    serve_shards                  = false
    shard_eviction_idle_seconds   = 600
    shard_max_vram_mb             = 20000
    """
    taken = parse_configuration(file.encode(), "config.toml")
    assert taken == msgspec.structs.replace(DistributedSettings(), activation_dtype="fp16")
    with pytest.raises(errors.BadRequest, match="backend: Invalid enum value 'petals_like'"):
        parse_configuration(file.replace("small_model_layered", "petals_like").encode(), "config.toml")


# ---------------------------------------------------------------- SwarmLLM

TIERS = {"BRONZE": 0.25, "SILVER": 0.5, "GOLD": 1, "PLATINUM": 2}


def test_tiers_and_figures_are_swarmllms() -> None:
    assert {tier.name: tier.value for tier in Tier} == TIERS
    assert GenerationSettings().prefill_chunk == 128  # prefill_chunk_tokens
    keeps_s = next(field.default for field in msgspec.structs.fields(ShardSettings) if field.name == "eviction_idle_s")
    assert keeps_s == 600  # of KV for a next turn
    assert AdmissionSettings().max_concurrent_requests == 16  # SwarmLLM: 10


@pytest.mark.parametrize(
    "name", ["activation_dtype", "petals_like", "max_concurrent_requests", "serve_shards", "model_not_found"]
)
def test_what_differs_is_written_down(name: str) -> None:
    assert re.search(rf"\b{name}\b", DIFFERENCES.read_text())
