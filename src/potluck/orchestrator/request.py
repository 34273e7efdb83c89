"""What is to be generated, and how patiently: the settings and the request of one generation. Pure data."""

from typing import NamedTuple

import msgspec

from potluck.core.grammar import Grammar
from potluck.core.limits import (
    DISTRIBUTED_FALLBACK_TO_LOCAL_AFTER_FAILURES,
    DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S,
    RING_CREDIT_TOKENS,
)
from potluck.core.sampling_params import SamplingParams
from potluck.wire.messages import Boundary


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a head is, and how it feeds a pipeline. Durations in seconds."""

    prefill_chunk: int = 128  # at most; shorter where that keeps more shards busy
    prefill_window: int | None = None  # chunks under way at once; None: as many as keep all shards busy
    uses_ring: bool = True
    ring_credits: int = RING_CREDIT_TOKENS
    keeps_outbox: bool = True
    keeps_kv: bool = (
        False  # leave it with the shards after the end, for a next request that begins with the same tokens
    )
    probe_after_s: float = 0.25  # without progress; or six times the usual step, whichever is longer
    probe_patience_s: float = 0.5  # a daemon that does not answer for so long is gone
    worker_patience_s: float = 0.5  # a worker that is silent for so long at work is frozen
    stall_timeout_s: float = DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S
    holder_wait_s: float = 5.0  # where nobody holds some layers, for a holder to come back
    holder_retry_s: float = 0.5  # between attempts with those that failed before, when nobody else is left
    fallback_after: int = DISTRIBUTED_FALLBACK_TO_LOCAL_AFTER_FAILURES


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated, in tokens."""

    model: str
    weights_sha256: str
    arithmetic: int
    layer_count: int
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    eos: tuple[int, ...]
    choice: int = 0
    boundaries: tuple[Boundary, ...] = ()
    vocabulary_size: int = 1 << 31  # a token past it is rubbish
    grammar: Grammar | None = None  # what the answer must spell
    prompt_logprobs: int | None = None  # alternatives to tell with each token of the prompt; None: nothing of that
    hidden_size: int = 0  # of the model, for what an activation weighs on a link; 0: unknown
    begun: tuple[int, ...] = ()  # tokens of the answer that its reader has had from another head, or earlier
    resume_key: bytes = (
        b""  # by which the sampling shard remembers the answer where this head is lost; empty: it does not
    )
    has_fixed_boundaries: bool = False  # they are those of an answer that has begun, even if there are none
    owner: str = ""  # whose request it is: KV that was kept is for the same owner's next one alone


class StepTiming(NamedTuple):
    """One token's way round: in all, computing, and waiting in shards (their worker's stream included); the rest is the wire's."""

    total_s: float
    stages: tuple[tuple[float, float], ...]  # computing and waiting, of each shard in turn

    @property
    def compute_s(self) -> float:
        return sum(compute_s for compute_s, _ in self.stages)

    @property
    def queue_s(self) -> float:
        return sum(queue_s for _, queue_s in self.stages)
