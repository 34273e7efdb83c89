"""What a generation tells whoever asked for it: tokens, and diagnostics about the shards that make them. Pure data."""

from typing import Literal

import msgspec

from potluck.core.exactness import Exactness


class TokenDelta(msgspec.Struct, frozen=True, tag="token_delta", tag_field="type"):
    """One accepted token; its text is the reader's business, who has the tokenizer."""

    token: int
    position: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token of the prompt. `is_greedy`: none was likelier there; `top`: the likeliest, as many as were asked for, ties by id."""

    token: int
    logprob: float
    is_greedy: bool
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs", tag_field="type"):
    """Comes once, before the first token, where it was asked for: the prompt's tokens from the second on."""

    positions: tuple[PromptLogprob, ...]


class ShardStatus(msgspec.Struct, frozen=True, tag="shard_status", tag_field="type"):
    shard_id: str
    node: str
    status: Literal["ok", "degraded"]
    reason: str = ""
    code: str = "shard_unavailable"


class ShardFailover(msgspec.Struct, frozen=True, tag="shard_failover", tag_field="type"):
    """A lost shard has been replaced and the answer goes on. `method`: how the new one got its KV."""

    lost: tuple[str, ...]
    replaced_by: tuple[str, ...]
    epoch: int
    pause_ms: float
    replayed_tokens: int
    method: Literal["replay", "re-prefill", "none"]
    exactness: Exactness = "bitwise"  # of the answer from here on


class PipelineAborted(msgspec.Struct, frozen=True, tag="pipeline_aborted", tag_field="type"):
    """The end where nothing else helped; what was generated is with the reader already."""

    code: str
    message: str
    generated_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="type"):
    """The end. `reason` is `stop`, `length` or `cancelled`; `exactness`: what the answer's numbers depended on.

    `reused_tokens`: so many of the prompt's were not computed again, because the shards had them from an earlier request.
    """

    reason: Literal["stop", "length", "cancelled"]
    generated_tokens: int
    failovers: int
    exactness: Exactness = "bitwise"
    reused_tokens: int = 0


StreamFrame = TokenDelta | PromptLogprobs | ShardStatus | ShardFailover | PipelineAborted | Finished
