"""Opens a model on disk, a GGUF file, a Hugging Face folder or a partial model, and checks that all of it is there.

Knows what each format calls a tensor; everything above sees canonical names only.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, cast

from potluck.core.errors import BadModelFile, ModelNotFound, UnknownFormat
from potluck.core.model_facts import ModelFacts
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.weights.checkpoint import BLOCKS, TensorEntry, TensorFormat
from potluck.weights.expected_tensors import expected_tensors, known_formats
from potluck.weights.gguf import read_gguf
from potluck.weights.gguf_facts import facts_from_gguf
from potluck.weights.hf_facts import facts_from_config
from potluck.weights.json_objects import read_json_object
from potluck.weights.mapped_file import MappedFile
from potluck.weights.partial_model import UnitFiles, is_partial, partial_tensors, read_manifest, read_tokenizer
from potluck.weights.safetensors import open_safetensors_folder, plain_file
from potluck.weights.source_tensor import SourceTensor, shown_name

MAX_CONFIG_BYTES = 1 << 20

_GGUF_NAMES = {"embedding": "token_embd.weight", "output_norm": "output_norm.weight", "output": "output.weight"}
_GGUF_ROLES = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "query_key_value": "attn_qkv.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "attention_output": "attn_output.weight",
    "attention_output_bias": "attn_output.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "feed_forward_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "gate_up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_feed_forward_norm": "post_ffw_norm.weight",
}
# Tensors that the facts have taken in already.
_GGUF_FACT_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

_FOLDER_ROLES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_key_value": "self_attn.qkv_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "attention_output": "self_attn.o_proj.weight",
    "attention_output_bias": "self_attn.o_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# With norms on both sides of each part, the name of the second one means what it says.
_FOLDER_POST_NORM_ROLES = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "feed_forward_norm": "pre_feedforward_layernorm.weight",
    "post_feed_forward_norm": "post_feedforward_layernorm.weight",
}
_FOLDER_GLM4_ROLES = {
    "post_attention_norm": "post_self_attn_layernorm.weight",
    "post_feed_forward_norm": "post_mlp_layernorm.weight",
}
# Where the decoder sits in a folder's names: alone, in a model that also sees pictures (new and old), without its head.
_FOLDER_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


class OpenedCheckpoint:
    """A Checkpoint over mapped files. `extra_tensors` names what lies in them and no fact calls for; it is not used."""

    def __init__(
        self,
        path: Path,
        facts: ModelFacts,
        tensors: Mapping[str, TensorEntry],
        extra_tensors: tuple[str, ...],
        files: Mapping[Path, MappedFile],
        read_tokenizer: Callable[[], TokenizerSpec | None],
    ) -> None:
        self.path = path
        self.facts = facts
        self.tensors = tensors
        self.extra_tensors = extra_tensors
        self._files = files
        self._read_tokenizer = read_tokenizer

    @functools.cached_property
    def tokenizer(self) -> TokenizerSpec | None:
        return self._read_tokenizer()

    def read(self, name: str) -> memoryview:
        entry = self.tensors[name]
        return self._files[entry.file].view(entry.offset, entry.size_bytes)

    def forget(self, name: str) -> None:
        entry = self.tensors[name]
        self._files[entry.file].forget(entry.offset, entry.size_bytes)

    def forget_all(self) -> None:
        for mapped in self._files.values():
            mapped.forget(0, mapped.size_bytes)

    def close(self) -> None:
        for mapped in self._files.values():
            mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<OpenedCheckpoint {self.path.name}: {self.facts.architecture}, {len(self.tensors)} tensors>"


def open_checkpoint(path: Path) -> OpenedCheckpoint:
    """Raises ModelNotFound where there is nothing, and BadModelFile or one of its kinds for what cannot be used."""
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise BadModelFile(path, "file", f"cannot be read: {error}") from error
    if not exists:
        raise ModelNotFound(f"{path}: there is no such file or folder")
    if is_folder:
        return _open_partial(path) if is_partial(path) else _open_folder(path)
    return _open_gguf(path)


def _open_partial(folder: Path) -> OpenedCheckpoint:
    manifest = read_manifest(folder)
    tensors, files = partial_tensors(folder, manifest), UnitFiles(folder, manifest)
    return OpenedCheckpoint(folder, manifest.facts, tensors, (), files, lambda: read_tokenizer(folder, manifest))


def _open_gguf(path: Path) -> OpenedCheckpoint:
    mapped = MappedFile(path)
    try:
        gguf = read_gguf(mapped)
        facts = facts_from_gguf(gguf)
        names = {name: gguf_name(name) for name in expected_tensors(facts)}
        tensors = _entries(facts, names, gguf.tensors, path)
        extra = set(gguf.tensors) - set(names.values()) - _GGUF_FACT_TENSORS
        _refuse_biases(path, [name for name in extra if name.startswith(("blk.", "output."))])
        metadata = gguf.metadata
        return OpenedCheckpoint(
            path, facts, tensors, tuple(sorted(extra)), {path: mapped}, lambda: _gguf_tokenizer(metadata, path)
        )
    except BaseException:
        mapped.close()
        raise


def _open_folder(folder: Path) -> OpenedCheckpoint:
    config = plain_file(folder, "config.json")
    facts = facts_from_config(read_json_object(config, MAX_CONFIG_BYTES), config)
    sources, files = open_safetensors_folder(folder)
    try:
        prefix = next((prefix for prefix in _FOLDER_PREFIXES if f"{prefix}embed_tokens.weight" in sources), "model.")
        names = {name: folder_name(name, facts, prefix) for name in expected_tensors(facts)}
        if "output" in names and prefix == "language_model.model.":
            names["output"] = "language_model.lm_head.weight"
        tensors = _entries(facts, names, sources, folder)
        extra = set(sources) - set(names.values())
        _refuse_biases(folder, [name for name in extra if name.startswith((f"{prefix}layers.", "lm_head."))])
        return OpenedCheckpoint(folder, facts, tensors, tuple(sorted(extra)), files, lambda: _folder_tokenizer(folder))
    except BaseException:
        for mapped in files.values():
            mapped.close()
        raise


def gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, layer, role = name.split(".")
    return f"blk.{layer}.{_GGUF_ROLES[role]}"


def folder_name(name: str, facts: ModelFacts, prefix: str) -> str:
    if not name.startswith("layers."):
        outer = {"embedding": f"{prefix}embed_tokens.weight", "output_norm": f"{prefix}norm.weight"}
        return outer.get(name, "lm_head.weight")
    _, layer, role = name.split(".")
    roles = _FOLDER_ROLES
    if facts.has_post_norms:
        roles = roles | (_FOLDER_GLM4_ROLES if facts.architecture == "glm4" else _FOLDER_POST_NORM_ROLES)
    return f"{prefix}layers.{layer}.{roles[role]}"


def _entries(
    facts: ModelFacts, names: Mapping[str, str], sources: Mapping[str, SourceTensor], path: Path
) -> dict[str, TensorEntry]:
    missing = [source_name for source_name in names.values() if source_name not in sources]
    if missing:
        some = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        raise BadModelFile(path, "tensors", f"{len(missing)} are missing: {some}")
    shapes = expected_tensors(facts)
    return {name: _entry(name, sources[source_name], shapes[name]) for name, source_name in names.items()}


def _entry(name: str, source: SourceTensor, shape: tuple[int, ...]) -> TensorEntry:
    field = f"tensor {shown_name(source.name)}"
    if source.shape != shape:
        raise BadModelFile(source.file, field, f"has the shape {source.shape}; the model's facts call for {shape}")
    known = known_formats(shape)
    if source.format not in known:
        raise UnknownFormat(source.file, field, f"format {source.format} is not supported; known: {', '.join(known)}")
    elements, size_bytes = BLOCKS[source.format]
    if elements == 1 and source.offset % size_bytes:
        raise BadModelFile(source.file, field, f"offset {source.offset} is not aligned for {source.format}")
    return TensorEntry(
        name, source.name, cast(TensorFormat, source.format), shape, source.file, source.offset, source.size_bytes
    )


def _refuse_biases(path: Path, extra: list[str]) -> None:
    # Most tensors that nobody asks for are harmless leftovers; leaving out a bias would quietly change every answer.
    for name in sorted(extra):
        if name.endswith(".bias"):
            raise BadModelFile(path, f"tensor {shown_name(name)}", "this bias is not supported")


def _gguf_tokenizer(metadata: Mapping[str, object], file: Path) -> TokenizerSpec | None:
    from potluck.weights.tokenizer_source import tokenizer_from_gguf

    return tokenizer_from_gguf(metadata, file)


def _folder_tokenizer(folder: Path) -> TokenizerSpec | None:
    from potluck.weights.tokenizer_source import tokenizer_from_folder

    return tokenizer_from_folder(folder)
