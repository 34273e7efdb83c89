"""From a model in the store to a served shard, and from a head's question to tokens: what `up` and `ask` put together."""

from pathlib import Path

import msgspec

from potluck.core.errors import BadRequest, WeightsMismatch
from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.node.node import Node, ServedModel
from potluck.shard.core import ShardSettings
from potluck.shard.server import ShardServer
from potluck.weights.manifest import Manifest, decode_manifest, tokenizer_sha256, weights_sha256
from potluck.weights.store import ModelStore
from potluck.wire.messages import Stage
from potluck.wire.worker_settings import WorkerSettings

ARITHMETIC_VERSION = 1  # what engine.cpu_engine computes by; the daemon does not import the engine


class StoredModel(msgspec.Struct, frozen=True):
    """Everything about a stored model that a daemon needs; no weights."""

    id: str
    path: Path
    packed_folder: Path
    weights_sha256: str
    facts: ModelFacts
    manifest: bytes
    tokenizer: bytes


def read_stored_model(store: ModelStore, name: str) -> StoredModel:
    entry = store.find(name)
    checkpoint = store.open(name)
    try:
        facts, spec = checkpoint.facts, checkpoint.tokenizer
    finally:
        checkpoint.close()
    return StoredModel(
        entry.id, store.path(name), store.packed_folder(name), entry.weights_sha256, facts, store.manifest(name),
        msgspec.json.encode(spec),
    )  # fmt: skip


def parse_stage(text: str | None, layer_count: int) -> Stage:
    """`0-14`, `15-output` or nothing for all. The ends bring the embedding and the output with them."""
    layers = LayerRange(0, layer_count) if text is None else LayerRange.parse(text, layer_count)
    return Stage(layers.start, layers.stop, layers.start == 0, layers.stop == layer_count)


def check_own_layers(stage: Stage, text: str, layer_count: int) -> None:
    """A coordinator's own layers are a prefix, a suffix with the output, or both ends; anything else cannot be routed around."""
    if stage.has_embedding or stage.has_output:
        return
    if stage.stop < layer_count and stage.start > 0:
        raise BadRequest(
            f"a coordinator cannot hold the middle slice {text}: write 0-K for the first layers or K-output for the last"
        )


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    threads: int = 1
    kv_budget_bytes: int = 2 << 30
    max_concurrent_streams: int = 16
    eviction_idle_s: float = 600.0
    is_spare: bool = False


def serve(node: Node, model: StoredModel, stage: Stage, settings: ServingSettings) -> ShardServer:
    shard = ShardSettings(
        model=model.id, weights_sha256=model.weights_sha256, arithmetic=ARITHMETIC_VERSION, layer_count=model.facts.layer_count,
        hidden_size=model.facts.hidden_size, stage=stage, max_concurrent_streams=settings.max_concurrent_streams,
        eviction_idle_s=settings.eviction_idle_s, is_spare=settings.is_spare,
    )  # fmt: skip
    worker = WorkerSettings(
        model_path=str(model.path), source=model.weights_sha256, packed_folder=str(model.packed_folder), threads=settings.threads,
        kv_budget_bytes=settings.kv_budget_bytes,
    )  # fmt: skip
    return node.add_shard(shard, worker, ServedModel(model.weights_sha256, model.manifest, model.tokenizer))


def check_tokenizer(manifest_data: bytes, tokenizer_data: bytes, expected: str) -> tuple[Manifest, TokenizerSpec]:
    """What a shard sent, if it is what the model's hash covers; WeightsMismatch otherwise."""
    manifest = decode_manifest(manifest_data)
    if weights_sha256(manifest) != expected:
        raise WeightsMismatch("a shard sent the manifest of another model")
    spec = msgspec.json.decode(tokenizer_data, type=TokenizerSpec)
    if tokenizer_sha256(spec) != manifest.tokenizer_sha256:
        raise WeightsMismatch("a shard sent a tokenizer that its manifest does not cover")
    return manifest, spec
