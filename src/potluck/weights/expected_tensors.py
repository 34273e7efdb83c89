"""Which tensors a decoder with given facts consists of, by canonical name, with their shapes. Pure."""

from potluck.core.model_facts import ModelFacts
from potluck.weights.checkpoint import BLOCKS

Shape = tuple[int, ...]


def expected_tensors(facts: ModelFacts) -> dict[str, Shape]:
    """Name → (rows, columns) or (length,), in the order in which a token meets them."""
    tensors: dict[str, Shape] = {"embedding": (facts.vocabulary_size, facts.hidden_size)}
    roles = layer_tensors(facts)
    for layer in range(facts.layer_count):
        tensors.update({f"layers.{layer}.{role}": shape for role, shape in roles.items()})
    tensors["output_norm"] = (facts.hidden_size,)
    if not facts.is_output_tied:
        tensors["output"] = (facts.vocabulary_size, facts.hidden_size)
    return tensors


def known_formats(shape: Shape) -> tuple[str, ...]:
    """What a tensor of this shape may be stored as: norms and biases are never quantised."""
    return tuple(BLOCKS) if len(shape) == 2 else ("F32", "F16", "BF16")


def layer_tensors(facts: ModelFacts) -> dict[str, Shape]:
    """The tensors of any one layer, by role."""
    return _attention(facts) | _feed_forward(facts)


def _attention(facts: ModelFacts) -> dict[str, Shape]:
    hidden = facts.hidden_size
    query_size = facts.head_count * facts.head_size
    kv_size = facts.kv_head_count * facts.head_size
    roles: dict[str, Shape] = {"attention_norm": (hidden,)}
    if facts.has_fused_query_key_value:
        roles["query_key_value"] = (query_size + 2 * kv_size, hidden)
    else:
        roles |= {"query": (query_size, hidden), "key": (kv_size, hidden), "value": (kv_size, hidden)}
    if facts.has_attention_bias:
        roles |= {"query_bias": (query_size,), "key_bias": (kv_size,), "value_bias": (kv_size,)}
    if facts.has_query_key_norm:
        roles |= {"query_norm": (facts.head_size,), "key_norm": (facts.head_size,)}
    roles["attention_output"] = (hidden, query_size)
    if facts.has_attention_output_bias:
        roles["attention_output_bias"] = (hidden,)
    if facts.has_post_norms:
        roles["post_attention_norm"] = (hidden,)
    return roles


def _feed_forward(facts: ModelFacts) -> dict[str, Shape]:
    hidden, inner = facts.hidden_size, facts.feed_forward_size
    roles: dict[str, Shape] = {"feed_forward_norm": (hidden,)}
    if facts.has_fused_gate_up:
        roles["gate_up"] = (2 * inner, hidden)
    else:
        roles |= {"gate": (inner, hidden), "up": (inner, hidden)}
    roles["down"] = (hidden, inner)
    if facts.has_post_norms:
        roles["post_feed_forward_norm"] = (hidden,)
    return roles
