"""Facts from config.json, compared with transformers: its configurations, its tensors, and its rotary frequencies."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers

from potluck.core.errors import BadModelFile, UnknownArchitecture, UnknownFormat
from potluck.core.model_facts import ModelFacts, Rotary, RotaryScaling
from potluck.weights.expected_tensors import expected_tensors
from potluck.weights.hf_facts import DEFAULTS, facts_from_config
from potluck.weights.open_model import folder_name
from tests.support.family_configs import CASES, LLAMA3, LONG, config_of, model_class_of
from tests.support.tiny_models import LLAMA_CONFIG

FILE = Path("config.json")


def facts_of(config: transformers.PretrainedConfig, use_diff: bool = True) -> ModelFacts:
    return facts_from_config(json.loads(config.to_json_string(use_diff=use_diff)), FILE)


def model_of(case: str) -> torch.nn.Module:
    with torch.device("meta"):
        return model_class_of(case)(config_of(case))


def frequencies(rotary: Rotary) -> list[float]:
    """What each pair turns by per position: a plain reading of RotaryScaling's description."""
    pairs = range(0, rotary.dimensions, 2)
    plain = [rotary.base ** (-pair / rotary.dimensions) for pair in pairs]
    scaling = rotary.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain]
    if scaling.kind == "factors":
        return [frequency / factor for frequency, factor in zip(plain, scaling.factors, strict=True)]
    if scaling.kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in plain]
    return _yarn(rotary, scaling, plain)


def _llama3(frequency: float, scaling: RotaryScaling) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def _yarn(rotary: Rotary, scaling: RotaryScaling, plain: list[float]) -> list[float]:
    def pair_with(turns: float) -> float:
        length = scaling.original_context / (turns * 2 * math.pi)
        return rotary.dimensions * math.log(length) / (2 * math.log(rotary.base))

    low = max(0, math.floor(pair_with(scaling.beta_fast)))
    high = min(rotary.dimensions - 1, math.ceil(pair_with(scaling.beta_slow)))
    ramp = [min(1.0, max(0.0, (pair - low) / (high - low or 0.001))) for pair in range(len(plain))]
    return [f / scaling.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_sizes_and_choices_agree_with_the_configuration(case: str) -> None:
    config = config_of(case)
    facts = facts_of(config)
    assert facts == facts_of(config, use_diff=False)
    assert facts.layer_count == config.num_hidden_layers
    assert facts.vocabulary_size == config.vocab_size
    assert facts.norm_epsilon == config.rms_norm_eps
    assert facts.is_output_tied == config.tie_word_embeddings
    assert facts.context_length == config.max_position_embeddings
    assert facts.activation == ("gelu_tanh" if "gemma" in case else "silu")
    is_gemma = "gemma" in case
    assert facts.norm_weight_plus_one == is_gemma
    assert facts.embedding_scale == (math.sqrt(config.hidden_size) if is_gemma else None)


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_those_of_the_model(case: str) -> None:
    facts = facts_of(config_of(case))
    ours = {folder_name(name, facts, "model."): shape for name, shape in expected_tensors(facts).items()}
    theirs = {name: tuple(value.shape) for name, value in model_of(case).state_dict().items()}
    if facts.is_output_tied:
        theirs.pop("lm_head.weight")
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_the_model(case: str) -> None:
    facts = facts_of(config_of(case))
    layers = model_of(case).model.layers
    assert facts.attention_scale == pytest.approx(layers[0].self_attn.scaling, rel=1e-12)
    assert facts.head_size == layers[0].self_attn.head_dim
    config = config_of(case)
    types = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if config.to_dict().get("sliding_window") else ""] * 3
    )
    for layer, kind in enumerate(types):
        assert facts.window_of(layer) == (config.sliding_window if kind == "sliding_attention" else None)
    assert facts.attention_soft_cap == (50.0 if case == "gemma2" else None)
    assert facts.output_soft_cap == (30.0 if case == "gemma2" else None)


@pytest.mark.parametrize("case", [case for case in CASES if "gemma3" not in case])
def test_rotary_frequencies_agree_with_the_model(case: str) -> None:
    facts = facts_of(config_of(case))
    rotary = model_class_of(case)(config_of(case)).model.rotary_emb
    if case == "phi3 long":  # we take the long factors for the whole model; transformers does past the original length
        rotary(torch.zeros(1), torch.tensor([[200]]))
    assert frequencies(facts.rotary) == pytest.approx(rotary.inv_freq.tolist(), rel=1e-5)
    magnitude = facts.rotary.scaling.magnitude if facts.rotary.scaling else 1.0
    assert magnitude == pytest.approx(rotary.attention_scaling, rel=1e-6)
    assert facts.rotary.form == ("interleaved" if case in ("glm", "glm4") else "halves")
    assert facts.rotary_local is None


@pytest.mark.parametrize("case", ["gemma3", "gemma3 stretched"])
def test_gemma3_turns_its_local_layers_differently(case: str) -> None:
    facts = facts_of(config_of(case))
    rotary = model_class_of(case)(config_of(case)).model.rotary_emb
    assert facts.rotary_local is not None
    assert frequencies(facts.rotary) == pytest.approx(rotary.full_attention_inv_freq.tolist(), rel=1e-5)
    assert frequencies(facts.rotary_local) == pytest.approx(rotary.sliding_attention_inv_freq.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", DEFAULTS)
def test_our_defaults_are_those_of_transformers(name: str) -> None:
    config_class = transformers.CONFIG_MAPPING["gemma3_text" if name == "gemma3" else name]
    defaults = config_class().to_dict()
    ours = dict(DEFAULTS[name])
    if ours.pop("rope_theta", None) is not None:
        assert defaults["rope_parameters"]["full_attention"]["rope_theta"] == DEFAULTS[name]["rope_theta"]
    if name in ("qwen2", "qwen3"):  # there the class forgets the window when it is switched off
        ours["sliding_window"] = None
    if "hidden_activation" in ours:
        ours.pop("hidden_act")
    assert {key: defaults[key] for key in ours} == ours


def plain(**changes: object) -> ModelFacts:
    """Facts from a hand-written config, as older files have it."""
    return facts_from_config(LLAMA_CONFIG | changes, FILE)


def test_the_older_way_to_write_the_rotary_part() -> None:
    assert plain().rotary == Rotary("halves", 10000.0, 8)
    scaling = plain(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}).rotary
    assert scaling.base == 5e5
    assert scaling.scaling == RotaryScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert plain(rope_scaling={"type": "linear", "factor": 2.0}).rotary.scaling == RotaryScaling("linear", 2.0)
    assert plain(rope_scaling=None).rotary.scaling is None


def test_phi3_by_its_older_names() -> None:
    base = {"model_type": "phi3", "original_max_position_embeddings": 64}
    for kind in ("su", "longrope"):
        facts = plain(**base, rope_scaling={"type": kind, **LONG})
        assert facts.rotary.scaling is not None
        assert facts.rotary.scaling.factors == (1.0, 2.0, 3.0, 4.0)
    facts = plain(**base | {"original_max_position_embeddings": 128}, rope_scaling={"type": "su", **LONG})
    assert facts.rotary.scaling is not None
    assert facts.rotary.scaling.factors == (1.0, 1.0, 1.5, 2.0)


def test_gemma3_as_published() -> None:
    """The text part of google/gemma-3-4b-it, which leaves nearly everything to defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    facts = facts_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, FILE)
    theirs = facts_of(transformers.Gemma3Config(text_config=text).text_config)
    assert facts == theirs
    assert facts.rotary.scaling == RotaryScaling("linear", 8.0)
    assert (facts.head_count, facts.kv_head_count, facts.head_size, facts.vocabulary_size) == (8, 4, 256, 262_208)
    assert sum(facts.sliding_layers) == 29
    assert facts.is_output_tied


def test_gemma_means_the_approximation() -> None:
    changes = {"model_type": "gemma", "head_dim": 8}
    assert plain(**changes, hidden_act="gelu").activation == "gelu_tanh"
    with pytest.raises(BadModelFile):
        plain(hidden_act="gelu")


def test_the_name_does_not_depend_on_the_folder() -> None:
    assert plain(_name_or_path="some/where/Tiny-1B").name == "Tiny-1B"
    assert plain().name == "llama"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gemma3n", "mamba", "phi", ""])
def test_unknown_architectures_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        plain(model_type=name)
    assert f"'{name}'" in caught.value.problem
    assert "gemma3_text, glm, glm4, llama, mistral, phi3, qwen2, qwen3" in caught.value.problem


def test_quantised_folders_are_refused() -> None:
    with pytest.raises(UnknownFormat):
        plain(quantization_config={"quant_method": "awq"})


WRONG: list[Mapping[str, object]] = [
    {"model_type": None},
    {"model_type": ["llama"]},
    {"model_type": "gemma3"},
    {"model_type": "gemma3", "text_config": []},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 10**400},
    {"num_hidden_layers": None},
    {"hidden_size": "32"},
    {"hidden_size": 32.0},
    {"hidden_size": True},
    {"hidden_size": 30},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 8},
    {"vocab_size": 1 << 21},
    {"head_dim": 5},
    {"head_dim": 1024},
    {"rms_norm_eps": float("inf")},
    {"rms_norm_eps": 0},
    {"rope_theta": -1.0},
    {"rope_theta": float("nan")},
    {"rope_scaling": "linear"},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear"}},
    {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
    {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
    {"rope_scaling": {"rope_type": 7}},
    {"rope_parameters": {"full_attention": 7}},
    {"rope_parameters": {"partial_rotary_factor": 0.0}},
    {"partial_rotary_factor": 2.0},
    {"hidden_act": "relu"},
    {"hidden_act": None},
    {"attention_bias": "yes"},
    {"mlp_bias": True},
    {"use_bidirectional_attention": True},
    {"model_type": "mistral", "sliding_window": 0},
    {"model_type": "mistral", "sliding_window": "all"},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["odd", "odd"]},
    {"model_type": "gemma2", "query_pre_attn_scalar": 0},
    {"model_type": "gemma2", "final_logit_softcapping": -1.0},
    {"_name_or_path": 7},
]


@pytest.mark.parametrize("changes", WRONG, ids=lambda changes: json.dumps(changes)[:60])
def test_wrong_values(changes: Mapping[str, object]) -> None:
    with pytest.raises(BadModelFile) as caught:
        plain(**changes)
    assert caught.value.file == "config.json"
