"""What is counted and measured, under the names that dashboards know (HearthNet §5.10, dots as underscores). No content, ever.

Labels are shard ids, reasons and node ids; activations, tokens and text never come here.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "distributed_inference_"
_MILLISECONDS = (0.5, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)


class Metrics:
    """One node's figures. Every node has its own registry, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pipeline_construct_ms = self._times("pipeline_construct_ms", "From a request to a pipeline that is open")
        self.first_token_ms = self._times("first_token_ms", "From a request to its first token")
        self.tokens_per_second = Gauge(
            _PREFIX + "tokens_per_second", "Of the last generation that ended", registry=self.registry
        )
        self.shard_latency_ms = self._times("shard_latency_ms", "From a step's arrival to its output", ["shard_id"])
        self.failover_pause_ms = self._times(
            "failover_pause_ms", "From the last progress before a loss to the next token"
        )
        self.failovers = self._counter("failovers", "Lost shards that were replaced in a running answer")
        self.reused_tokens = self._counter("reused_tokens", "Of prompts, that shards had from an earlier request")
        self.fallback_to_local = self._counter("fallback_to_local", "Answers that went on with this node's own copy")
        self.shard_corruption_detected = self._counter(
            "shard_corruption_detected", "Activations that no sound shard sends", ["node"]
        )
        self.dropped_messages = self._counter("dropped_messages", "Messages that were refused or stale", ["reason"])
        self.requests = self._counter("requests", "Sessions opened for other nodes", ["caller"])

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(_PREFIX + name, text, labels or [], registry=self.registry)

    def _times(self, name: str, text: str, labels: list[str] | None = None) -> Histogram:
        return Histogram(_PREFIX + name, text, labels or [], registry=self.registry, buckets=_MILLISECONDS)

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
