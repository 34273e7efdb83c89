"""From a model in the store to a served shard, and from a head's question to tokens: what `up` and `ask` put together."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from potluck.core.control_groups import OWN_GROUPS
from potluck.core.errors import (
    BadRequest,
    ModelNotFound,
    PotluckError,
    ShardUnavailable,
    WeightsMismatch,
    WeightsMissing,
)
from potluck.core.exactness import arithmetic_of
from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.core.processors import own_cores, usable_cores
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.node.machine import whole_cores
from potluck.node.node import Node, ServedModel
from potluck.node.weight_server import OfferedWeights
from potluck.shard.server import ShardServer
from potluck.shard.settings import ShardSettings
from potluck.weights.checkpoint import TensorEntry
from potluck.weights.device_memory import device_bytes, vram_required_mb
from potluck.weights.manifest import Manifest, decode_manifest, tokenizer_sha256, weights_sha256
from potluck.weights.partial_model import read_manifest, sound_units
from potluck.weights.random_checkpoint import open_random
from potluck.weights.store import ModelStore
from potluck.weights.tokenizer_rules import check_spec
from potluck.weights.units import held_of, ranges_of, shown_units, stage_units, unit_of
from potluck.wire.messages import Stage
from potluck.wire.worker_settings import WorkerSettings

_SPIN_S, _SPINNING_CORES = 0.004, 8
_LOOK_S = 0.003  # steps that take longer are rehearsed
_REHEARSING_CORES, _LOOKING_CORES, _WATCHING_CORES = 2, 4, 6
_REHEARSAL_LEAD_S = 0.0012  # two daemons and a worker are reached in about half of it
_REHEARSAL_WATCH_S = 0.003
_SHORTEST_REHEARSED_S, _SHORTEST_ON_FEW_CORES_S = 0.0006, 0.003
_LOAD_LOOK_S = 0.5  # between looks whether a worker that loads keeps dying


class StoredModel(msgspec.Struct, frozen=True):
    """Everything about a stored model that a daemon needs; no weights."""

    id: str
    path: Path | str
    packed_folder: Path | None
    weights_sha256: str
    facts: ModelFacts
    manifest: bytes
    tokenizer: bytes
    tensors: Mapping[str, TensorEntry]  # where they lie, in the manifest's order
    units: tuple[str, ...] | None = None  # of a partial model: what is held; None: everything

    def offered(self) -> OfferedWeights:
        return OfferedWeights(self.weights_sha256, self.manifest, self.tokenizer, self.tensors)

    def held_layers(self) -> list[LayerRange]:
        """The layers whose weights are on this machine."""
        count = self.facts.layer_count
        return [LayerRange(0, count)] if self.units is None else ranges_of(held_of(self.units, count).layers)

    def require(self, stage: Stage) -> None:
        """Raises WeightsMissing with the layers that a partial model lacks for a stage."""
        missing = set(stage_units(self.facts, stage)) - set(self.units or ())
        if self.units is not None and missing:
            lacking = shown_units(missing, self.facts.layer_count)
            raise WeightsMissing(f"{self.id} is held in part; {lacking} cannot be served from here")


def read_stored_model(store: ModelStore, name: str) -> StoredModel:
    entry = store.find(name)
    checkpoint = store.open(name)
    try:
        facts, spec, tensors = checkpoint.facts, checkpoint.tokenizer, checkpoint.tensors
    finally:
        checkpoint.close()
    path = store.path(name)
    return StoredModel(
        entry.id, path, store.packed_folder(name), entry.weights_sha256, facts, store.manifest(name),
        msgspec.json.encode(spec), tensors, sound_units(path, read_manifest(path)) if entry.format == "partial" else None,
    )  # fmt: skip


async def started(server: ShardServer) -> None:
    """Returns when it is loaded. Raises what loading raises, and ShardUnavailable where its worker dies again and again."""
    starting = asyncio.get_running_loop().create_task(server.start())
    try:
        while not (await asyncio.wait({starting}, timeout=_LOAD_LOOK_S))[0]:
            if (trouble := trouble_of(server)) is not None:
                raise trouble
        await starting
    finally:
        starting.cancel()


def trouble_of(server: ShardServer) -> PotluckError | None:
    """Why a shard can serve nobody: its worker keeps dying, or could not load it, be it for a session after it had slept."""
    if server.supervisor.needs_attention:
        return ShardUnavailable(f"the worker of {server.shard_id} keeps dying; is there enough memory?")
    return server.load_failure


def own_copy(store: ModelStore, name: str, weights_sha256: str) -> str:
    """What the store calls the model with these weights, which others call `name`. Raises ModelNotFound, WeightsMismatch."""
    entries = store.list()
    same = [entry.id for entry in entries if entry.weights_sha256 == weights_sha256]
    if same:
        return name if name in same else same[0]
    if name in [entry.id for entry in entries]:
        raise WeightsMismatch(f"{name} on this machine has other weights than the shards' ({weights_sha256[:12]})")
    raise ModelNotFound(f"{name} is not on this machine, so it cannot hold layers of it; type: potluck pull {name}")


def random_model(name: str) -> StoredModel:
    """A model of random weights, for benchmarks: no file, no tokenizer, and a hash of its name instead of its content."""
    checkpoint = open_random(name)
    digest = hashlib.sha256(name.encode()).hexdigest()
    return StoredModel(name, name, None, digest, checkpoint.facts, b"", b"", {})


def parse_stage(text: str | None, layer_count: int) -> Stage:
    """`0-14`, `15-output` or nothing for all. The ends bring the embedding and the output with them."""
    layers = LayerRange(0, layer_count) if text is None else LayerRange.parse(text, layer_count)
    return Stage(layers.start, layers.stop, layers.start == 0, layers.stop == layer_count)


def parse_own_layers(text: str, layer_count: int) -> tuple[Stage, ...]:
    """A coordinator's own layers: `0-4` (a prefix), `25-output` (a suffix), both with a comma, `embedding`, `output`.

    The output belongs to it only where it is named, as in ds4. Raises BadRequest for what cannot be routed around.
    """
    stages = tuple(_own_stage(part.strip(), layer_count) for part in text.split(","))
    prefixes = [stage for stage in stages if stage.has_embedding]
    suffixes = [stage for stage in stages if stage.has_output]
    if len(stages) > 2 or len(prefixes) > 1 or len(suffixes) > 1:
        raise BadRequest(f"a coordinator holds one range at each end of the model at most, not {text}")
    if len(stages) == 2 and prefixes[0].stop > suffixes[0].start:
        raise BadRequest(f"layers {suffixes[0].start}-{prefixes[0].stop - 1} are named twice in {text}")
    return tuple(sorted(stages, key=lambda stage: stage.has_output))


def _own_stage(text: str, layer_count: int) -> Stage:
    if text == "embedding":
        return Stage(0, 0, True, False)
    if text == "output":
        return Stage(layer_count, layer_count, False, True)
    layers = LayerRange.parse(text, layer_count)
    stage = Stage(layers.start, layers.stop, layers.start == 0, text.endswith("-output"))
    if stage.has_embedding or stage.has_output:
        return stage
    if stage.stop == layer_count:
        raise BadRequest(f"a coordinator's layers {text} stop short of the output: write {layers.start}-output")
    raise BadRequest(
        f"a coordinator cannot hold the middle slice {text}: write 0-K for the first layers or K-output for the last"
    )


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    threads: int = 1
    kv_budget_bytes: int = 2 << 30
    max_concurrent_streams: int = 16
    eviction_idle_s: float = 600.0
    is_spare: bool = False
    device: str = "cpu"  # or "cuda", "cuda:1"
    device_budget_bytes: int | None = None  # what a shard may take of a GPU, weights and KV; None: what is free
    is_batch_invariant: bool = False


def within_memory(model: StoredModel, stage: Stage, settings: ServingSettings, budget_bytes: int) -> ServingSettings:
    """With so much KV as the weights leave of a budget. Raises BadRequest where they leave nothing."""
    units = set(stage_units(model.facts, stage))
    weight_bytes = sum(tensor.size_bytes for name, tensor in model.tensors.items() if unit_of(name) in units)
    if weight_bytes >= budget_bytes:
        raise BadRequest(
            f"{shown_units(units, model.facts.layer_count)} of {model.id} take {weight_bytes / 1e6:.1f} MB, and shards may have "
            f"{budget_bytes / 1e6:.1f} MB (--memory, host.shard_max_vram_mb); serve fewer, or allow more"
        )
    kv_bytes = min(settings.kv_budget_bytes, budget_bytes - weight_bytes)
    return msgspec.structs.replace(settings, kv_budget_bytes=kv_bytes)


def vram_mb(model: StoredModel, stage: Stage, settings: ServingSettings) -> int:
    """What the shard will need of a GPU's memory; 0 on the CPU."""
    if settings.device == "cpu":
        return 0
    tensors = model.tensors or open_random(str(model.path)).tensors
    layers = LayerRange(stage.start, stage.stop) if stage.stop > stage.start else None
    weights = device_bytes(tensors, model.facts, layers, stage.has_embedding, stage.has_output)
    return vram_required_mb(weights, settings.kv_budget_bytes)


def spin_s(device: str) -> float:
    """A GPU's steps are so short that waking up would be a good part of a token's time; and such a machine has cores to spare."""
    is_gpu = device == "cuda" or (device.startswith("cuda:") and device[5:].isdigit())
    return _SPIN_S if is_gpu and usable_cores() >= _SPINNING_CORES else 0.0


def rehearsal_lead_s(device: str) -> float:
    """On CPUs with a core for it, since the worker whose turn is next leaves all of them idle. GPUs' nodes stay awake anyway."""
    return _REHEARSAL_LEAD_S if spin_s(device) == 0 and usable_cores() >= _REHEARSING_CORES else 0.0


def rehearsal_shortest_s() -> float:
    """On two or three cores whoever rehearses is in the way of the worker that has just begun, and of a short step that is most of it."""
    return _SHORTEST_REHEARSED_S if usable_cores() >= _LOOKING_CORES else _SHORTEST_ON_FEW_CORES_S


def rehearsal_reaches_worker() -> bool:
    """On two or three cores a worker that is woken while another one computes gets that one's core."""
    return usable_cores() >= _LOOKING_CORES


def awake_s(device: str) -> float:
    """How long a worker looks for the step that was rehearsed. On two cores whoever looks is in the way of those who send it."""
    return _REHEARSAL_WATCH_S if rehearsal_lead_s(device) and usable_cores() >= _LOOKING_CORES else 0.0


def rehearsal_watch_s(device: str, threads: int) -> float:
    """A daemon that looks for a step needs a core that neither its worker nor anybody else wants."""
    has_room = whole_cores() >= max(_WATCHING_CORES, threads + 1)
    return _REHEARSAL_WATCH_S if rehearsal_lead_s(device) and has_room else 0.0


def look_s(device: str, threads: int) -> float:
    """On two or three cores daemon and worker look for what comes soon, each on cores of its own: whole ones, whose time is not rationed.

    Not with several threads: one that helps may run anywhere, also where daemons look.
    """
    has_cores = 2 <= own_cores() < _LOOKING_CORES and whole_cores() == own_cores() and OWN_GROUPS.cores() is None
    return _LOOK_S if device == "cpu" and threads == 1 and has_cores else 0.0


def serve(node: Node, model: StoredModel, stage: Stage, settings: ServingSettings) -> ShardServer:
    """Raises WeightsMissing where a partial model does not cover the stage. Its weights are offered to peers as well."""
    model.require(stage)
    shard = ShardSettings(
        model=model.id, weights_sha256=model.weights_sha256, layer_count=model.facts.layer_count,
        hidden_size=model.facts.hidden_size, stage=stage, max_concurrent_streams=settings.max_concurrent_streams,
        eviction_idle_s=settings.eviction_idle_s, is_spare=settings.is_spare,
        rehearsal_lead_s=rehearsal_lead_s(settings.device), rehearsal_shortest_s=rehearsal_shortest_s(),
        rehearsal_reaches_worker=rehearsal_reaches_worker(),
        rehearsal_watch_s=rehearsal_watch_s(settings.device, settings.threads), spin_s=spin_s(settings.device),
        look_s=look_s(settings.device, settings.threads),
        arithmetic=arithmetic_of(settings.device, is_batch_invariant=settings.is_batch_invariant),
        vram_required_mb=vram_mb(model, stage, settings),
    )  # fmt: skip
    packed_folder = None if model.packed_folder is None else str(model.packed_folder)
    worker = WorkerSettings(
        model_path=str(model.path), source=model.weights_sha256, packed_folder=packed_folder, threads=settings.threads,
        kv_budget_bytes=settings.kv_budget_bytes, device=settings.device, is_batch_invariant=settings.is_batch_invariant,
        spin_s=spin_s(settings.device), awake_s=awake_s(settings.device), device_budget_bytes=settings.device_budget_bytes,
    )  # fmt: skip
    node.weights.offer(model.offered())
    return node.add_shard(shard, worker, ServedModel(model.weights_sha256, model.manifest, model.tokenizer))


def check_tokenizer(manifest_data: bytes, tokenizer_data: bytes, expected: str) -> tuple[Manifest, TokenizerSpec]:
    """What a shard sent, if it is what the model's hash covers; WeightsMismatch otherwise. BadModelFile where nobody could use it."""
    manifest = decode_manifest(manifest_data)
    if weights_sha256(manifest) != expected:
        raise WeightsMismatch("a shard sent the manifest of another model")
    try:
        spec = msgspec.json.decode(tokenizer_data, type=TokenizerSpec)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise WeightsMismatch("a shard sent something else than a tokenizer") from None
    if tokenizer_sha256(spec) != manifest.tokenizer_sha256:
        raise WeightsMismatch("a shard sent a tokenizer that its manifest does not cover")
    return manifest, check_spec(spec, "the model's tokenizer")
