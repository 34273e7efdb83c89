"""The bounds that every model's facts must keep, whichever file or peer they came from. Pure."""

import math

from potluck.core.errors import BadModelFile
from potluck.core.model_facts import ModelFacts, Rotary, RotaryScaling

MAX_LAYERS = 1024
MAX_HIDDEN = 65_536
MAX_FEED_FORWARD = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_SIZE = 512
MAX_VOCABULARY = 1 << 20
MAX_CONTEXT = 1 << 24
MAX_NAME = 200


def check_facts(facts: ModelFacts, file: object) -> None:
    """Raises BadModelFile, which names the fact."""
    checks = _Checks(file)
    checks.sizes(facts)
    checks.attention(facts)
    checks.rotary("rotary", facts.rotary, facts.head_size)
    if facts.rotary_local is not None:
        checks.rotary("rotary_local", facts.rotary_local, facts.head_size)
    checks.sliding(facts)
    checks.unsupported(facts)


class _Checks:
    def __init__(self, file: object) -> None:
        self._file = file

    def sizes(self, facts: ModelFacts) -> None:
        self._integer("layer_count", facts.layer_count, 1, MAX_LAYERS)
        self._integer("hidden_size", facts.hidden_size, 1, MAX_HIDDEN)
        self._integer("feed_forward_size", facts.feed_forward_size, 1, MAX_FEED_FORWARD)
        self._integer("vocabulary_size", facts.vocabulary_size, 1, MAX_VOCABULARY)
        self._integer("context_length", facts.context_length, 1, MAX_CONTEXT)
        self._number("norm_epsilon", facts.norm_epsilon, 1e-12, 0.1)
        self._integer("name", len(facts.name), 0, MAX_NAME)
        if facts.embedding_scale is not None:
            self._number("embedding_scale", facts.embedding_scale, 1e-6, 1e6)

    def attention(self, facts: ModelFacts) -> None:
        self._integer("head_count", facts.head_count, 1, MAX_HEADS)
        self._integer("kv_head_count", facts.kv_head_count, 1, facts.head_count)
        if facts.head_count % facts.kv_head_count:
            self._fail("kv_head_count", f"{facts.head_count} heads cannot be shared out among {facts.kv_head_count}")
        self._even("head_size", facts.head_size, MAX_HEAD_SIZE)
        self._number("attention_scale", facts.attention_scale, 1e-6, 1e3)
        for field in ("attention_soft_cap", "output_soft_cap"):
            cap = getattr(facts, field)
            if cap is not None:
                self._number(field, cap, 1e-3, 1e6)

    def rotary(self, field: str, rotary: Rotary, head_size: int) -> None:
        self._number(f"{field}.base", rotary.base, 1.0 + 1e-6, 1e12)
        self._even(f"{field}.dimensions", rotary.dimensions, head_size)
        if rotary.scaling is not None:
            self._scaling(f"{field}.scaling", rotary.scaling, rotary.dimensions)

    def sliding(self, facts: ModelFacts) -> None:
        if facts.sliding_layers and len(facts.sliding_layers) != facts.layer_count:
            self._fail("sliding_layers", f"has {len(facts.sliding_layers)} entries for {facts.layer_count} layers")
        if facts.sliding_window is not None:
            self._integer("sliding_window", facts.sliding_window, 1, MAX_CONTEXT)
        elif any(facts.sliding_layers):
            self._fail("sliding_window", "is missing, though some layers have one")

    def unsupported(self, facts: ModelFacts) -> None:
        # Checkpoints have no names for these tensors yet, so leaving them out would quietly change the text.
        if facts.has_feed_forward_bias:
            self._fail("has_feed_forward_bias", "biases in the feed-forward part are not supported")
        if facts.has_attention_bias and facts.has_fused_query_key_value:
            self._fail("has_attention_bias", "biases on a fused query, key and value are not supported")

    def _scaling(self, field: str, scaling: RotaryScaling, dimensions: int) -> None:
        self._number(f"{field}.factor", scaling.factor, 1e-3, 1e6)
        self._number(f"{field}.magnitude", scaling.magnitude, 1e-3, 1e3)
        self._integer(f"{field}.original_context", scaling.original_context, 0, MAX_CONTEXT)
        for name in ("low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow"):
            self._number(f"{field}.{name}", getattr(scaling, name), 1e-6, 1e6)
        if scaling.kind in ("llama3", "yarn") and scaling.original_context == 0:
            self._fail(f"{field}.original_context", "is missing")
        if scaling.kind == "llama3" and scaling.low_frequency_factor >= scaling.high_frequency_factor:
            self._fail(f"{field}.low_frequency_factor", "is not below the high one")
        if len(scaling.factors) != (dimensions // 2 if scaling.kind == "factors" else 0):
            self._fail(f"{field}.factors", f"{len(scaling.factors)} factors do not fit {dimensions} dimensions")
        for factor in scaling.factors:
            self._number(f"{field}.factors", factor, 1e-6, 1e6)

    def _integer(self, field: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            self._fail(field, f"{value} is not between {low} and {high}")

    def _even(self, field: str, value: int, high: int) -> None:
        self._integer(field, value, 2, high)
        if value % 2:
            self._fail(field, f"{value} is odd")

    def _number(self, field: str, value: float, low: float, high: float) -> None:
        if not math.isfinite(value) or not low <= value <= high:
            self._fail(field, f"{value} is not between {low:g} and {high:g}")

    def _fail(self, field: str, problem: str) -> None:
        raise BadModelFile(self._file, field, problem)
