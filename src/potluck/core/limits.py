"""Limits and constants that other systems know by these names; each is a default or a bound, never a tuning knob in code."""

ARITHMETIC_VERSION = 1  # of docs/arithmetic.md; shards that compute by another are not mixed
DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S = 30.0
DISTRIBUTED_FALLBACK_TO_LOCAL_AFTER_FAILURES = 2
TENSOR_CHUNK_BYTES = 1 << 20
TENSOR_FLOW_CONTROL_WINDOW = 16

RING_CREDIT_TOKENS = 16
MAX_SHARDS_PER_REQUEST = 16
