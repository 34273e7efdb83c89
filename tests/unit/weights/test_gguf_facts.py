"""Facts from GGUF metadata: every family as llama.cpp's converters write it, and what is refused."""

import math
import struct
from pathlib import Path

import msgspec
import pytest

from potluck.core.errors import BadModelFile, UnknownArchitecture
from potluck.core.model_facts import ModelFacts, Rotary, RotaryScaling
from potluck.weights.gguf import read_gguf
from potluck.weights.gguf_facts import facts_from_gguf
from potluck.weights.mapped_file import MappedFile
from tests.support.gguf_files import Tensor, gguf_bytes, metadata_of
from tests.support.tiny_models import LLAMA_FACTS

EMBEDDING = {"token_embd.weight": Tensor("F32", (16, 32))}


def facts_of(
    tmp_path: Path, architecture: str = "llama", tensors: dict[str, Tensor] | None = None, **changes: object
) -> ModelFacts:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata_of(architecture, **changes), EMBEDDING | (tensors or {})))
    return facts_from_gguf(read_gguf(MappedFile(path)))


def floats(*values: float) -> Tensor:
    return Tensor("F32", (len(values),), struct.pack(f"<{len(values)}f", *values))


def test_llama(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert abs(facts.norm_epsilon - 1e-5) < 1e-12
    assert facts == msgspec.structs.replace(LLAMA_FACTS, norm_epsilon=facts.norm_epsilon)
    assert not facts_of(tmp_path, tensors={"output.weight": Tensor("F32", (16, 32))}).is_output_tied


def test_llama_3_carries_factors(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, tensors={"rope_freqs.weight": floats(1.0, 2.0, 4.0, 8.0)})
    assert facts.rotary.scaling == RotaryScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))


def test_mistral_with_a_window(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, attention__sliding_window=64)
    assert (facts.sliding_window, facts.sliding_layers) == (64, (True, True))
    assert (
        facts_of(tmp_path, attention__sliding_window=128).sliding_window is None
    )  # the context is no longer than that


def test_qwen2(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "qwen2", {"blk.0.attn_q.bias": Tensor("F32", (32,))})
    assert facts.has_attention_bias
    assert not facts.has_attention_output_bias
    assert facts.rotary == Rotary("halves", 10000.0, 8)


def test_qwen3(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "qwen3", attention__key_length=16, attention__value_length=16)
    assert facts.has_query_key_norm
    assert (facts.head_size, facts.attention_scale, facts.rotary.dimensions) == (16, 0.25, 16)


def test_gemma(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "gemma")
    assert facts.activation == "gelu_tanh"
    assert facts.embedding_scale == math.sqrt(32)
    assert not facts.norm_weight_plus_one
    assert not facts.has_post_norms
    assert facts.output_soft_cap is None


def test_gemma2(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "gemma2", block_count=3, attention__key_length=16, attention__value_length=16)
    assert (facts.attention_soft_cap, facts.output_soft_cap) == (50.0, 30.0)
    assert (facts.sliding_window, facts.sliding_layers) == (4096, (True, False, True))
    assert facts.attention_scale == 0.25
    assert facts.has_post_norms
    assert facts.rotary_local is None
    assert facts.rotary_of(0) == facts.rotary


@pytest.mark.parametrize(("architecture", "layer_count"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_models_scale_queries_their_own_way(tmp_path: Path, architecture: str, layer_count: int) -> None:
    sizes = {"attention__key_length": 16, "attention__value_length": 16}
    assert facts_of(tmp_path, architecture, block_count=layer_count, **sizes).attention_scale == 1 / math.sqrt(32 // 4)
    assert facts_of(tmp_path, architecture, block_count=layer_count - 1, **sizes).attention_scale == 0.25
    odd = {"embedding_length": 4, "attention__head_count": 8, "attention__head_count_kv": 8}
    assert facts_of(tmp_path, architecture, block_count=layer_count, **sizes, **odd).attention_scale == 1.0


def test_gemma3(tmp_path: Path) -> None:
    changes = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 1e6}
    facts = facts_of(tmp_path, "gemma3", block_count=7, attention__sliding_window=64, **changes)
    assert facts.sliding_layers == (True, True, True, True, True, False, True)
    assert facts.rotary == Rotary("halves", 1e6, 8, RotaryScaling("linear", 8.0))
    assert facts.rotary_local == Rotary("halves", 10000.0, 8)
    assert facts.rotary_of(0) == facts.rotary_local
    assert facts.rotary_of(5) == facts.rotary
    assert (facts.attention_soft_cap, facts.output_soft_cap) == (None, None)
    assert facts.has_query_key_norm
    assert facts_of(tmp_path, "gemma3").rotary_local is None


def test_gemma3_with_other_patterns(tmp_path: Path) -> None:
    window = {"attention__sliding_window": 64}
    key = "attention__sliding_window_pattern"
    assert facts_of(tmp_path, "gemma3", **window, **{key: 2}).sliding_layers == (True, False)
    assert facts_of(tmp_path, "gemma3", **window, **{key: [False, True]}).sliding_layers == (False, True)
    for wrong in (0, [True], [2, 1], "2"):
        with pytest.raises(BadModelFile):
            facts_of(tmp_path, "gemma3", **window, **{key: wrong})


def test_phi3(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "phi3", {"blk.0.attn_qkv.weight": Tensor("F32", (64, 32))})
    assert facts.has_fused_query_key_value
    assert facts.has_fused_gate_up
    assert facts.rotary.scaling is None
    assert not facts_of(tmp_path, "phi3", {"blk.0.ffn_gate.weight": Tensor("F32", (64, 32))}).has_fused_gate_up


def test_phi3_stretched(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": floats(1, 2, 3, 4), "rope_factors_short.weight": floats(1, 1, 1, 2)}
    long = facts_of(tmp_path, "phi3", factors, rope__scaling__original_context_length=64).rotary.scaling
    assert long is not None
    assert long.factors == (1.0, 2.0, 3.0, 4.0)
    assert long.magnitude == pytest.approx(math.sqrt(1 + math.log(2) / math.log(64)), rel=1e-7)
    short = facts_of(tmp_path, "phi3", factors, rope__scaling__original_context_length=128).rotary.scaling
    assert short is not None
    assert (short.factors, short.magnitude) == ((1.0, 1.0, 1.0, 2.0), 1.0)
    given = facts_of(
        tmp_path, "phi3", factors, rope__scaling__original_context_length=64, rope__scaling__attn_factor=1.25
    ).rotary.scaling
    assert given is not None
    assert given.magnitude == 1.25


def test_yarn(tmp_path: Path) -> None:
    changes = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    scaling = facts_of(tmp_path, "qwen2", **changes, rope__scaling__original_context_length=32).rotary.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 4.0, 32)
    assert scaling.magnitude == pytest.approx(0.1 * math.log(4) + 1, rel=1e-7)


def test_no_scaling(tmp_path: Path) -> None:
    assert facts_of(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0).rotary.scaling is None
    assert facts_of(tmp_path, rope__scaling__factor=0.0).rotary.scaling is None
    assert facts_of(tmp_path, rope__scaling__factor=4.0).rotary.scaling == RotaryScaling("linear", 4.0)


def test_lists_with_one_entry_per_layer(tmp_path: Path) -> None:
    assert facts_of(tmp_path, attention__head_count_kv=[2, 2]).kv_head_count == 2
    for wrong in ([2, 4], [0, 0], ["x", "x"]):
        with pytest.raises(BadModelFile):
            facts_of(tmp_path, attention__head_count_kv=wrong)


@pytest.mark.parametrize("architecture", ["qwen3moe", "mamba", "gemma3n", "mistral", ""])
def test_unknown_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        facts_of(tmp_path, architecture)
    assert f"'{architecture}'" in caught.value.problem
    assert "gemma, gemma2, gemma3, glm4, llama, phi3, qwen2, qwen3" in caught.value.problem


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="8 experts"):
        facts_of(tmp_path, expert_count=8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 1025),
        ("block_count", None),
        ("block_count", "2"),
        ("embedding_length", 65537),
        ("embedding_length", 33),  # not a multiple of the heads
        ("feed_forward_length", 0),
        ("attention__head_count", 0),
        ("attention__head_count_kv", 3),
        ("attention__head_count_kv", 8),
        ("attention__key_length", 7),
        ("attention__key_length", 1024),
        ("attention__value_length", 16),
        ("context_length", 0),
        ("context_length", 2**31),
        ("attention__layer_norm_rms_epsilon", 0.0),
        ("attention__layer_norm_rms_epsilon", -1.0),
        ("attention__layer_norm_rms_epsilon", 0.5),
        ("attention__layer_norm_rms_epsilon", float("nan")),
        ("rope__freq_base", float("inf")),
        ("rope__freq_base", 0.0),
        ("rope__dimension_count", 16),
        ("rope__dimension_count", 3),
        ("rope__scaling__type", "dynamic"),
        ("rope__scaling__factor", -1.0),
        ("rope__scaling__factor", float("nan")),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(BadModelFile):
        facts_of(tmp_path, **{key: value})


@pytest.mark.parametrize(
    "factors",
    [floats(1, 2, 3), floats(1, 2, 3, 0), floats(1, 2, 3, float("nan")), Tensor("F16", (4,)), Tensor("F32", (4, 1))],
)
def test_rotary_factors_that_do_not_fit(tmp_path: Path, factors: Tensor) -> None:
    with pytest.raises(BadModelFile):
        facts_of(tmp_path, tensors={"rope_freqs.weight": factors})


def test_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for metadata, tensors in (
        ({}, EMBEDDING),
        ({"general.architecture": 7}, EMBEDDING),
        (metadata_of(), {}),
        (metadata_of(), {"token_embd.weight": Tensor("F32", (16,))}),
        (metadata_of() | {"split.count": 3}, EMBEDDING),
    ):
        path.write_bytes(gguf_bytes(metadata, tensors))
        with pytest.raises(BadModelFile):
            facts_from_gguf(read_gguf(MappedFile(path)))
