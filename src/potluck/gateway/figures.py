"""What the gateway counts, under vLLM's names where they fit, so that dashboards work. No content, ever."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from potluck.gateway.admission import Admission
from potluck.gateway.events import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Figures:
    """One server's; every server has its own registry."""

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        running = Gauge("vllm:num_requests_running", "Requests that are being answered", registry=registry)
        running.set_function(lambda: admission.running_count)
        waiting = Gauge("vllm:num_requests_waiting", "Requests that wait for their turn", registry=registry)
        waiting.set_function(lambda: admission.waiting_count)
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated = Counter("vllm:generation_tokens", "Tokens of answers", registry=registry)
        self._finished = Counter(
            "vllm:request_success", "Answers, by how they ended", ["finished_reason"], registry=registry
        )
        self._failed = Counter("potluck_api_errors", "Failed requests, by code", ["code"], registry=registry)
        self._first = self._times("vllm:time_to_first_token_seconds", "From a request's turn to its first token")
        self._total = self._times(
            "vllm:e2e_request_latency_seconds", "From a request to its last token, waiting included"
        )

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=_SECONDS)

    def note(self, usage: Usage, total_s: float) -> None:
        self._prompt.inc(usage.prompt_tokens)
        self._generated.inc(usage.completion_tokens)
        self._first.observe(usage.first_token_s)
        self._total.observe(total_s)

    def finished(self, reason: str) -> None:
        self._finished.labels(finished_reason=reason).inc()

    def failed(self, code: str) -> None:
        """`code` comes from the error table: a closed set."""
        self._failed.labels(code=code).inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)
