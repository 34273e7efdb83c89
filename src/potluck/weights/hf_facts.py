"""ModelFacts from a Hugging Face `config.json`. Touches no weights; knows old and new ways to write the rotary part.

Where a file leaves something open, the rules are those of transformers, including its defaults.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from potluck.core.errors import BadModelFile, UnknownFormat
from potluck.core.model_facts import Activation, ModelFacts, Rotary, RotaryScaling
from potluck.weights.fact_checks import (
    MAX_CONTEXT,
    MAX_FEED_FORWARD,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_NAME,
    MAX_VOCABULARY,
    check_facts,
)
from potluck.weights.families import Family, family_called, long_magnitude, periodic_layers, rounded
from potluck.weights.fields import Fields
from potluck.weights.source_tensor import shown

MODEL_TYPES = {
    name: name for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "glm", "glm4")
} | {
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# What transformers assumes for keys that a file leaves out. Sizes have a default only for Gemma 3, whose published
# files rely on it.
_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GLM = {
    **_COMMON, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131_072, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {**_COMMON, "max_position_embeddings": 2048},
    "mistral": {
        **_COMMON, "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {
        **_COMMON, "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        **_COMMON, "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096,
        "max_window_layers": 28, "head_dim": 128,
    },
    "gemma": {**_COMMON, **_GEMMA, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
    "gemma2": {
        **_COMMON, **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **_COMMON, **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 131_072,
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "rope_theta": 1_000_000.0,
    },
    "phi3": {
        **_COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    },
    "glm": _GLM,
    "glm4": _GLM,
}  # fmt: skip


def facts_from_config(config: Mapping[str, object], file: Path) -> ModelFacts:
    """Raises BadModelFile, UnknownArchitecture, or UnknownFormat for weights quantised in ways we do not know."""
    model_type = Fields(config, file).text("model_type")
    family = family_called(model_type, MODEL_TYPES, file, "model_type")
    if config.get("quantization_config") is not None:
        raise UnknownFormat(file, "quantization_config", "quantised safetensors are not supported; use a GGUF file")
    fields = Fields({**DEFAULTS[family.name], **_text_part(config, file)}, file)
    if fields.flag("use_bidirectional_attention"):
        raise fields.bad("use_bidirectional_attention", "is not supported")
    facts = _facts(family, fields)
    check_facts(facts, file)
    return facts


def _text_part(config: Mapping[str, object], file: Path) -> Mapping[str, object]:
    """The decoder's own settings: models that also see pictures keep them apart."""
    if config.get("model_type") != "gemma3":
        return config
    part = config.get("text_config")
    if not isinstance(part, dict):
        raise BadModelFile(file, "text_config", "is missing")
    # Whether the output is tied may stand in either place.
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True), **part}


def _facts(family: Family, fields: Fields) -> ModelFacts:
    layer_count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN)
    head_count = fields.integer("num_attention_heads", 1, MAX_HEADS)
    head_size = _head_size(fields, hidden_size, head_count)
    rotary, rotary_local = _rotaries(family, fields, head_size)
    sliding_window, sliding_layers = _sliding(family, fields, layer_count)
    has_attention_bias, has_attention_output_bias = _attention_biases(family, fields)
    return ModelFacts(
        architecture=family.name,
        name=_name(family, fields)[:MAX_NAME],
        layer_count=layer_count,
        hidden_size=hidden_size,
        feed_forward_size=fields.integer("intermediate_size", 1, MAX_FEED_FORWARD),
        head_count=head_count,
        kv_head_count=fields.integer("num_key_value_heads", 1, MAX_HEADS, default=head_count),
        head_size=head_size,
        vocabulary_size=fields.integer("vocab_size", 1, MAX_VOCABULARY),
        context_length=fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        norm_epsilon=fields.number("rms_norm_eps", 1e-12, 0.1),
        norm_weight_plus_one=family.scales_embedding,  # both are Gemma's ways
        activation=_activation(family, fields),
        rotary=rotary,
        rotary_local=rotary_local if any(sliding_layers) else None,
        attention_scale=_attention_scale(family, fields, head_size),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping") if family.name == "gemma2" else None,
        output_soft_cap=_soft_cap(fields, "final_logit_softcapping") if _is_later_gemma(family) else None,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        has_attention_bias=has_attention_bias,
        has_attention_output_bias=has_attention_output_bias,
        has_feed_forward_bias=family.name == "llama" and fields.flag("mlp_bias"),
        has_query_key_norm=family.has_query_key_norm,
        has_post_norms=family.has_post_norms,
        has_fused_query_key_value=family.name == "phi3",
        has_fused_gate_up=family.fuses_gate_up,
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else None,
        is_output_tied=fields.flag("tie_word_embeddings"),
    )


def _is_later_gemma(family: Family) -> bool:
    return family.scales_embedding and family.has_post_norms


def _name(family: Family, fields: Fields) -> str:
    # Not the folder's name: the facts are hashed, and must not depend on where somebody keeps the files.
    return fields.text("_name_or_path", "").rstrip("/").rpartition("/")[2] or family.name


def _head_size(fields: Fields, hidden_size: int, head_count: int) -> int:
    default = hidden_size // head_count if hidden_size % head_count == 0 else None
    return fields.integer("head_dim", 2, MAX_HEAD_SIZE, default)


def _activation(family: Family, fields: Fields) -> Activation:
    key = "hidden_activation" if _is_later_gemma(family) else "hidden_act"
    name = fields.text(key)
    if family.name == "gemma" and name == "gelu":  # the first files say so and mean the approximation
        return "gelu_tanh"
    if name not in _ACTIVATIONS:
        raise fields.bad(key, f"{shown(name)} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attention_scale(family: Family, fields: Fields, head_size: int) -> float:
    if _is_later_gemma(family):
        return 1.0 / math.sqrt(fields.number("query_pre_attn_scalar", 1e-3, 1e6))
    return 1.0 / math.sqrt(head_size)


def _soft_cap(fields: Fields, key: str) -> float | None:
    return fields.number(key, 1e-3, 1e6) if fields.has(key) else None


def _attention_biases(family: Family, fields: Fields) -> tuple[bool, bool]:
    """On query, key and value; on the output."""
    if family.name == "qwen2":
        return True, False
    if family.name in ("mistral", "phi3"):
        return False, False
    has_bias = fields.flag("attention_bias")
    return has_bias, has_bias and family.name not in ("glm", "glm4")


def _sliding(family: Family, fields: Fields, layer_count: int) -> tuple[int | None, tuple[bool, ...]]:
    is_off = family.name in ("qwen2", "qwen3") and not fields.flag("use_sliding_window")
    if family.name in ("llama", "gemma", "glm", "glm4") or is_off or not fields.has("sliding_window"):
        return None, ()
    window = fields.integer("sliding_window", 1, (1 << 32) - 1)
    layers = _sliding_layers(family, fields, layer_count)
    # A window that no context outgrows is none; where it also picks the rotation (Gemma 3), it stays.
    is_pointless = family.sliding_period == 1 and window >= fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    return (None, ()) if is_pointless or not any(layers) else (min(window, MAX_CONTEXT), layers)


def _sliding_layers(family: Family, fields: Fields, layer_count: int) -> tuple[bool, ...]:
    if family.name in ("mistral", "phi3"):  # transformers does not look at layer types here
        return (True,) * layer_count
    types = fields.get("layer_types")
    if types is not None:
        return _from_layer_types(fields, types, layer_count)
    if family.name in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", 0, MAX_LAYERS)
        return tuple(layer >= first for layer in range(layer_count))
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, family.sliding_period)
    return periodic_layers(period if family.name == "gemma3" else family.sliding_period, layer_count)


def _from_layer_types(fields: Fields, types: object, layer_count: int) -> tuple[bool, ...]:
    if not isinstance(types, list) or len(types) != layer_count:
        raise fields.bad("layer_types", f"{shown(types)} is not a list with one entry for each of {layer_count} layers")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise fields.bad("layer_types", f"{shown(kind)} is not supported")
    return tuple(kind == "sliding_attention" for kind in types)


def _rotaries(family: Family, fields: Fields, head_size: int) -> tuple[Rotary, Rotary | None]:
    """For all layers; for those with a sliding window, where they differ."""
    part = (
        fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.file, is_nested=True)
    )
    full = part.section("full_attention")
    local = part.section("sliding_attention")
    rotary = _rotary(family, fields, full or part, head_size, fields.number("rope_theta", 1.0, 1e12, 10_000.0))
    if family.name == "gemma3":
        base = fields.number("rope_local_base_freq", 1.0, 1e12, 10_000.0)
        return rotary, _rotary(family, fields, local or Fields({}, fields.file), head_size, base)
    rotary_local = _rotary(family, fields, local, head_size, rotary.base) if local else None
    return rotary, None if rotary_local == rotary else rotary_local


def _rotary(family: Family, fields: Fields, part: Fields, head_size: int, default_base: float) -> Rotary:
    base = part.number("rope_theta", 1.0, 1e12, default_base)
    usual = fields.number("partial_rotary_factor", 0.0, 1.0, family.rotary_share)
    dimensions = int(head_size * part.number("partial_rotary_factor", 0.0, 1.0, usual))
    return Rotary(family.rotary_form, base, dimensions, _scaling(family, fields, part, dimensions))


def _scaling(family: Family, fields: Fields, part: Fields, dimensions: int) -> RotaryScaling | None:
    kind = part.text("rope_type", part.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling("linear", part.number("factor", 1e-3, 1e6))
    if kind == "llama3":
        return _llama3(fields, part)
    if kind == "longrope" or (family.name == "phi3" and kind in ("su", "yarn")):
        return _longrope(family, fields, part, dimensions)
    if kind == "yarn":
        return _yarn(fields, part)
    known = "default, linear, llama3, yarn, longrope"
    raise part.bad("rope_type", f"{shown(kind)} is not supported; known: {known}")


def _llama3(fields: Fields, part: Fields) -> RotaryScaling:
    return RotaryScaling(
        "llama3",
        part.number("factor", 1e-3, 1e6),
        low_frequency_factor=part.number("low_freq_factor", 1e-6, 1e6),
        high_frequency_factor=part.number("high_freq_factor", 1e-6, 1e6),
        original_context=_original_context(fields, part),
    )


def _yarn(fields: Fields, part: Fields) -> RotaryScaling:
    if not part.flag("truncate", default=True):
        raise part.bad("truncate", "false is not supported")
    original_context = _original_context(fields, part)
    factor = part.number("factor", 1e-3, 1e6, _context(fields) / original_context)
    return RotaryScaling(
        "yarn",
        factor,
        original_context=original_context,
        beta_fast=part.number("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=part.number("beta_slow", 1e-6, 1e6, 1.0),
        magnitude=part.number("attention_factor", 1e-3, 1e3, _yarn_magnitude(part, factor)),
    )


def _yarn_magnitude(part: Fields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    above = part.number("mscale", 0.0, 1e3, 0.0)
    below = part.number("mscale_all_dim", 0.0, 1e3, 0.0)
    return rounded(scale(above) / scale(below) if above and below else scale(1.0))


def _longrope(family: Family, fields: Fields, part: Fields, dimensions: int) -> RotaryScaling:
    """Long factors where the context is longer than the original one, whatever a prompt's length.

    transformers goes by each prompt; but keys that lie in the cache cannot be rotated anew when an answer grows longer.
    """
    original_context = _original_context(fields, part)
    context = _context(fields)
    factor = part.number("factor", 1e-3, 1e6, context / original_context)
    key = "long_factor" if context > original_context else "short_factor"
    return RotaryScaling(
        "factors",
        original_context=original_context,
        magnitude=part.number("attention_factor", 1e-3, 1e3, long_magnitude(factor, original_context)),
        factors=part.numbers(key, dimensions // 2, 1e-6, 1e6),
    )


def _context(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", 1, MAX_CONTEXT)


def _original_context(fields: Fields, part: Fields) -> int:
    """What the model was first trained for; a value outside the rotary part goes first, as in transformers."""
    key = "original_max_position_embeddings"
    return (fields if fields.has(key) else part).integer(key, 1, MAX_CONTEXT, _context(fields))
