"""ModelFacts from a GGUF file's metadata and tensor list. Reads no weights but the few numbers of rotary factors.

Where a file leaves something open, the rules are llama.cpp's, because files are written for it.
"""

import math
import struct

from potluck.core.errors import BadModelFile, UnknownArchitecture
from potluck.core.model_facts import ModelFacts, Rotary, RotaryForm, RotaryScaling
from potluck.weights.fact_checks import (
    MAX_CONTEXT,
    MAX_FEED_FORWARD,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_NAME,
    check_facts,
)
from potluck.weights.families import Family, family_called, long_magnitude, periodic_layers, rounded
from potluck.weights.fields import Fields
from potluck.weights.gguf import GgufFile
from potluck.weights.source_tensor import shown

# Mistral's files call themselves llama.
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "glm4")}

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def facts_from_gguf(gguf: GgufFile) -> ModelFacts:
    """Raises BadModelFile or UnknownArchitecture."""
    general = Fields(gguf.metadata, gguf.path)
    architecture = general.text("general.architecture")
    family = family_called(architecture, ARCHITECTURES, gguf.path, "general.architecture")
    fields = Fields(gguf.metadata, gguf.path, f"{architecture}.")
    _refuse_the_rest(general, fields)
    facts = _facts(gguf, family, general, fields)
    check_facts(facts, gguf.path)
    return facts


def _facts(gguf: GgufFile, family: Family, general: Fields, fields: Fields) -> ModelFacts:
    layer_count = fields.integer("block_count", 1, MAX_LAYERS)
    hidden_size = fields.integer("embedding_length", 1, MAX_HIDDEN)
    head_count = _uniform(fields, "attention.head_count", MAX_HEADS)
    head_size = _head_size(fields, hidden_size, head_count)
    rotary = _rotary(gguf, family, fields, head_size)
    sliding_window, sliding_layers = _sliding(family, fields, layer_count)
    tensors = gguf.tensors
    return ModelFacts(
        architecture=family.name,
        name=general.text("general.name", general.text("general.basename", family.name))[:MAX_NAME],
        layer_count=layer_count,
        hidden_size=hidden_size,
        feed_forward_size=_uniform(fields, "feed_forward_length", MAX_FEED_FORWARD),
        head_count=head_count,
        kv_head_count=_uniform(fields, "attention.head_count_kv", MAX_HEADS, default=head_count),
        head_size=head_size,
        vocabulary_size=_vocabulary_size(gguf),
        context_length=fields.integer("context_length", 1, MAX_CONTEXT),
        norm_epsilon=fields.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        activation=family.activation,
        rotary=rotary,
        rotary_local=_rotary_local(family, fields, rotary) if any(sliding_layers) else None,
        attention_scale=_attention_scale(family, layer_count, hidden_size, head_count, head_size),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0) if family.name == "gemma2" else None,
        output_soft_cap=_output_soft_cap(family, fields),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        has_attention_bias="blk.0.attn_q.bias" in tensors,
        has_attention_output_bias="blk.0.attn_output.bias" in tensors,
        has_query_key_norm=family.has_query_key_norm,
        has_post_norms=family.has_post_norms,
        has_fused_query_key_value="blk.0.attn_qkv.weight" in tensors,
        has_fused_gate_up=family.fuses_gate_up and "blk.0.ffn_gate.weight" not in tensors,
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else None,
        is_output_tied="output.weight" not in tensors,
    )


def _refuse_the_rest(general: Fields, fields: Fields) -> None:
    if general.integer("split.count", 0, 65_535, default=1) > 1:
        raise general.bad("split.count", "models split over several files are not supported; join them with gguf-split")
    experts = fields.integer("expert_count", 0, 1 << 20, default=0)
    if experts > 0:
        known = ", ".join(sorted(ARCHITECTURES))
        problem = f"a mixture of {experts} experts is not supported; known are the plain forms of {known}"
        raise UnknownArchitecture(fields.file, "expert_count", problem)


def _uniform(fields: Fields, key: str, high: int, default: int | None = None) -> int:
    """An integer that may also stand as a list with one entry per layer, all of them the same."""
    value = fields.get(key)
    if isinstance(value, list) and value:
        if any(entry != value[0] for entry in value):
            raise fields.bad(key, "differs from layer to layer, which is not supported")
        return Fields({key: value[0]}, fields.file).integer(key, 1, high)
    return fields.integer(key, 1, high, default)


def _head_size(fields: Fields, hidden_size: int, head_count: int) -> int:
    default = hidden_size // head_count if hidden_size % head_count == 0 else None
    size = fields.integer("attention.key_length", 2, MAX_HEAD_SIZE, default)
    if fields.integer("attention.value_length", 2, MAX_HEAD_SIZE, default=size) != size:
        raise fields.bad("attention.value_length", "differs from the key's, which is not supported")
    return size


def _vocabulary_size(gguf: GgufFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadModelFile(gguf.path, "tensor token_embd.weight", "is missing or not a matrix")
    return embedding.shape[0]


def _attention_scale(family: Family, layer_count: int, hidden_size: int, head_count: int, head_size: int) -> float:
    # The file does not hold the query's scale; only the 27B models depart from the usual one.
    if layer_count == _LAYERS_OF_27B.get(family.name):
        return 1.0 / math.sqrt(max(1, hidden_size // head_count))
    return 1.0 / math.sqrt(head_size)


def _soft_cap(fields: Fields, key: str, default: float) -> float | None:
    """A cap of 0 means none, as llama.cpp has it."""
    return fields.number(key, 0.0, 1e6, default) or None


def _output_soft_cap(family: Family, fields: Fields) -> float | None:
    if family.name not in ("gemma2", "gemma3"):
        return None
    return _soft_cap(fields, "final_logit_softcapping", 30.0 if family.name == "gemma2" else 0.0)


def _sliding(family: Family, fields: Fields, layer_count: int) -> tuple[int | None, tuple[bool, ...]]:
    default = 4096 if family.name == "gemma2" else 0
    window = fields.integer("attention.sliding_window", 0, (1 << 32) - 1, default)
    if window == 0:
        return None, ()
    layers = _sliding_layers(family, fields, layer_count)
    # A window that no context outgrows is none; where it also picks the rotation (Gemma 3), it stays.
    if family.sliding_period == 1 and window >= fields.integer("context_length", 1, MAX_CONTEXT):
        return None, ()
    return min(window, MAX_CONTEXT), layers


def _sliding_layers(family: Family, fields: Fields, layer_count: int) -> tuple[bool, ...]:
    key = "attention.sliding_window_pattern"
    pattern = fields.get(key)
    if isinstance(pattern, list):
        if len(pattern) != layer_count or any(entry not in (0, 1) for entry in pattern):
            raise fields.bad(key, f"is not one boolean for each of {layer_count} layers")
        return tuple(bool(entry) for entry in pattern)
    if pattern is None and family.sliding_period == 1:
        return (True,) * layer_count
    return periodic_layers(fields.integer(key, 1, MAX_LAYERS, family.sliding_period), layer_count)


def _rotary(gguf: GgufFile, family: Family, fields: Fields, head_size: int) -> Rotary:
    dimensions = fields.integer("rope.dimension_count", 2, head_size, default=head_size)
    # Converters reorder the rows of Llama's queries and keys so that pairs become neighbours.
    form: RotaryForm = "interleaved" if family.name == "llama" else family.rotary_form
    base = fields.number("rope.freq_base", 1.0, 1e12, default=10_000.0)
    return Rotary(form, base, dimensions, _scaling(gguf, fields, dimensions))


def _rotary_local(family: Family, fields: Fields, rotary: Rotary) -> Rotary | None:
    if family.name != "gemma3":
        return None
    base = fields.number("rope.freq_base_swa", 1.0, 1e12, default=10_000.0)
    return Rotary(rotary.form, base, rotary.dimensions)


def _scaling(gguf: GgufFile, fields: Fields, dimensions: int) -> RotaryScaling | None:
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise fields.bad("rope.scaling.type", f"{shown(kind)} is not supported; known: none, linear, yarn, longrope")
    # A factor of 0 means that there is none, as llama.cpp has it; the second key is from before the first.
    factor = fields.number("rope.scaling.factor", 0.0, 1e6, fields.number("rope.scale_linear", 0.0, 1e6, 0.0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    original_context = fields.integer("rope.scaling.original_context_length", 0, MAX_CONTEXT, default=0)
    factors = _factors(gguf, fields, dimensions, original_context)
    if factors is not None:
        if factor != 1.0:
            raise fields.bad("rope.scaling.factor", "stands beside factors for each frequency, which is not supported")
        return factors
    if kind == "yarn" and factor != 1.0:
        return _yarn(fields, factor, original_context)
    return RotaryScaling("linear", factor) if factor != 1.0 else None


def _yarn(fields: Fields, factor: float, original_context: int) -> RotaryScaling:
    magnitude = (0.1 * math.log(factor) + 1.0) if factor > 1.0 else 1.0
    return RotaryScaling(
        "yarn",
        factor,
        original_context=original_context or fields.integer("context_length", 1, MAX_CONTEXT),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
        magnitude=rounded(magnitude * fields.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)),
    )


def _factors(gguf: GgufFile, fields: Fields, dimensions: int, original_context: int) -> RotaryScaling | None:
    """Factors that the file holds as small tensors: Llama 3's, or Phi-3's for a long or a short context."""
    if "rope_freqs.weight" in gguf.tensors:
        return RotaryScaling("factors", factors=_small_tensor(gguf, "rope_freqs.weight", dimensions // 2))
    context = fields.integer("context_length", 1, MAX_CONTEXT)
    original_context = original_context or context
    is_long = context > original_context
    name = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    if name not in gguf.tensors:
        return None
    return RotaryScaling(
        "factors",
        original_context=original_context,
        magnitude=fields.number(
            "rope.scaling.attn_factor", 1e-3, 1e3, long_magnitude(context / original_context, original_context)
        ),
        factors=_small_tensor(gguf, name, dimensions // 2),
    )


def _small_tensor(gguf: GgufFile, name: str, count: int) -> tuple[float, ...]:
    tensor = gguf.tensors[name]
    if tensor.format != "F32" or tensor.shape != (count,):
        raise BadModelFile(gguf.path, f"tensor {name}", f"is not a list of {count} F32 numbers")
    return struct.unpack(f"<{count}f", gguf.mapped.view(tensor.offset, tensor.size_bytes))
