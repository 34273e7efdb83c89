"""Opening whole models: tensors under canonical names, and a named refusal for what is missing or does not fit."""

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from potluck.core.errors import BadModelFile, ModelNotFound, PotluckError, UnknownFormat
from potluck.weights.checkpoint import BLOCKS, LAYER_ROLES, Checkpoint
from potluck.weights.expected_tensors import layer_tensors
from potluck.weights.open_model import (
    _FOLDER_POST_NORM_ROLES,
    _FOLDER_ROLES,
    _GGUF_ROLES,
    OpenedCheckpoint,
    open_checkpoint,
)
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore
from tests.support.family_configs import CASES, config_of, model_class_of
from tests.support.gguf_files import Tensor, gguf_bytes, metadata_of, tensors_of
from tests.support.tiny_models import (
    LLAMA_CONFIG,
    LLAMA_FACTS,
    folder_tensors,
    safetensors_bytes,
    tiny_gguf,
    write_folder,
)


def opened(tmp_path: Path, data: bytes) -> OpenedCheckpoint:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return open_checkpoint(path)


def refusal(path: Path) -> BadModelFile:
    with pytest.raises(BadModelFile) as caught:
        open_checkpoint(path)
    return caught.value


def gguf_refusal(tmp_path: Path, data: bytes) -> BadModelFile:
    (tmp_path / "model.gguf").write_bytes(data)
    return refusal(tmp_path / "model.gguf")


def test_both_formats_know_every_role() -> None:
    assert set(_GGUF_ROLES) == set(_FOLDER_ROLES) | set(_FOLDER_POST_NORM_ROLES) == set(LAYER_ROLES)


def test_a_gguf_file(tmp_path: Path) -> None:
    checkpoint: Checkpoint = opened(tmp_path, tiny_gguf())
    expected = tensors_of(LLAMA_FACTS)
    roles = layer_tensors(LLAMA_FACTS)
    layers = {f"layers.{layer}.{role}" for layer in (0, 1) for role in roles}
    assert set(checkpoint.tensors) == layers | {"embedding", "output_norm"}
    for name, entry in checkpoint.tensors.items():
        assert entry.name == name
        assert bytes(checkpoint.read(name)) == expected[entry.source_name].data
        assert checkpoint.read(name).readonly
    assert checkpoint.tensors["layers.1.key"].shape == (16, 32)
    with pytest.raises(KeyError):
        checkpoint.read("layers.2.key")
    checkpoint.close()


@pytest.mark.parametrize("format_name", BLOCKS)
def test_every_format(tmp_path: Path, format_name: str) -> None:
    elements = BLOCKS[format_name][0]
    if elements == 256:
        sizes = {"embedding_length": 256, "feed_forward_length": 256}
        facts = msgspec.structs.replace(LLAMA_FACTS, hidden_size=256, feed_forward_size=256, head_size=64)
        data = gguf_bytes(metadata_of(**sizes), tensors_of(facts, format_name))
    else:
        data = tiny_gguf(format_name)
    checkpoint = opened(tmp_path, data)
    entry = checkpoint.tensors["embedding"]
    assert entry.format == format_name
    assert entry.size_bytes == entry.shape[0] * entry.shape[1] // elements * BLOCKS[format_name][1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_of_every_family_hold_the_models_bytes(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    model = model_class_of(case)(config_of(case)).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    for entry in checkpoint.tensors.values():
        expected = state[entry.source_name].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(checkpoint.read(entry.name)) == expected
    assert checkpoint.extra_tensors == ()
    assert {entry.format for entry in checkpoint.tensors.values()} == {"F32" if dtype == torch.float32 else "BF16"}


def test_a_gemma_that_also_sees(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=config_of("gemma3").to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.facts.architecture == "gemma3"
    assert checkpoint.tensors["embedding"].source_name.endswith("embed_tokens.weight")
    assert any("vision" in name for name in checkpoint.extra_tensors)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        open_checkpoint(tmp_path / "missing")
    assert "config.json" in str(refusal(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    assert "model.safetensors" in str(refusal(tmp_path))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA_FACTS)
    del tensors["blk.1.ffn_down.weight"]
    assert "blk.1.ffn_down.weight" in gguf_refusal(tmp_path, gguf_bytes(metadata_of(), tensors)).problem
    more_layers = gguf_refusal(tmp_path, gguf_bytes(metadata_of(block_count=1024), tensors_of(LLAMA_FACTS)))
    assert "9198 are missing: blk.2.attn_norm.weight" in more_layers.problem
    assert len(str(more_layers)) < 1000


def test_shapes_must_fit_the_facts(tmp_path: Path) -> None:
    turned = gguf_refusal(tmp_path, tiny_gguf(blk__0__ffn_up__weight=Tensor("F32", (32, 64))))
    assert turned.field == "tensor blk.0.ffn_up.weight"
    assert "(64, 32)" in turned.problem
    gguf_refusal(tmp_path, tiny_gguf(blk__0__attn_norm__weight=Tensor("F32", (32, 1))))
    gguf_refusal(tmp_path, tiny_gguf(metadata=metadata_of(feed_forward_length=32)))


def test_norms_are_not_quantised(tmp_path: Path) -> None:
    error = gguf_refusal(tmp_path, tiny_gguf(output_norm__weight=Tensor("Q8_0", (32,))))
    assert isinstance(error, UnknownFormat)
    assert opened(tmp_path, tiny_gguf(output_norm__weight=Tensor("F16", (32,)))).tensors["output_norm"].format == "F16"


def test_formats_that_only_lie_beside_are_no_harm(tmp_path: Path) -> None:
    counters = Tensor("F32", (4,), type_id=26)  # I32 takes as much room
    assert opened(tmp_path, tiny_gguf(counters=counters)).extra_tensors == ("counters",)
    error = gguf_refusal(tmp_path, tiny_gguf(blk__0__attn_q__weight=Tensor("F32", (32, 32), type_id=26)))
    assert isinstance(error, UnknownFormat)
    assert "I32" in error.problem


@pytest.mark.parametrize("name", ["blk__0__ffn_up__bias", "blk__1__attn_qkv__bias", "output__bias"])
def test_a_bias_is_never_left_out_quietly(tmp_path: Path, name: str) -> None:
    error = gguf_refusal(tmp_path, tiny_gguf(**{name: Tensor("F32", (32,))}))
    assert error.field == f"tensor {name.replace('__', '.')}"


def test_folders_with_formats_we_cannot_use(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = folder_tensors(LLAMA_CONFIG)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = ("F8_E4M3", (64, 32), bytes(64 * 32))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    error = refusal(folder)
    assert isinstance(error, UnknownFormat)
    assert name in error.field


def test_tensors_that_numbers_cannot_be_read_from_in_place(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    odd = {"odd": ("U8", (1,), b"x")} | folder_tensors(LLAMA_CONFIG)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(odd))
    assert "not aligned" in refusal(folder).problem


def test_a_config_that_is_too_long_or_leads_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text(" " * (1 << 20) + json.dumps(LLAMA_CONFIG))
    assert "longer" in refusal(folder).problem
    (folder / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert "leads out" in refusal(folder).problem


def test_a_snapshot_of_hugging_faces_cache_is_links_to_the_blobs_beside_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "models--a--b" / "snapshots" / "0123abcd")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.facts.layer_count == LLAMA_FACTS.layer_count
    pulled = Puller(ModelStore(tmp_path / "models")).pull(str(folder), "b").entry
    assert pulled.layer_count == LLAMA_FACTS.layer_count
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    assert "leads out" in refusal(folder).problem


def test_no_file_stays_open_after_a_refusal(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", LLAMA_CONFIG, files=3)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": 9}))
    (tmp_path / "model.gguf").write_bytes(tiny_gguf(metadata=metadata_of(block_count=9)))
    before = len(os.listdir("/proc/self/fd"))
    for path in (folder, tmp_path / "model.gguf"):
        for _ in range(5):
            with pytest.raises(PotluckError):
                open_checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before
