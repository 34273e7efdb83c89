"""What an answer is made of, whichever API asked for it: one stream of events for all choices. Pure data."""

from typing import Literal

import msgspec

from potluck.core.exactness import Exactness
from potluck.orchestrator.frames import PipelineAborted, ShardFailover, ShardStatus

FinishReason = Literal["stop", "length", "tool_calls"]


class ShownToken(msgspec.Struct, frozen=True):
    """A token as clients see one: its text (which may be half a character) and its bytes."""

    id: int
    text: str
    data: bytes
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True):
    """`start`: in the choice's text, the place of the first character that the token has a part in."""

    chosen: ShownToken
    start: int
    top: tuple[ShownToken, ...] = ()


class TextDelta(msgspec.Struct, frozen=True):
    choice: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens that became text since the last delta


class ToolCallStarted(msgspec.Struct, frozen=True):
    choice: int
    index: int
    call_id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of a call's arguments."""

    choice: int
    index: int
    text: str


class PromptShown(msgspec.Struct, frozen=True):
    """The prompt's own tokens, where a completion was asked to echo them; the first has no logprob (NaN)."""

    choice: int
    tokens: tuple[TokenLogprobs, ...]


class ChoiceFinished(msgspec.Struct, frozen=True):
    choice: int
    reason: FinishReason
    stop: str | None = None  # the stop string that ended it


class Diagnostics(msgspec.Struct, frozen=True):
    """What happened to the shards meanwhile."""

    choice: int
    frame: ShardStatus | ShardFailover | PipelineAborted


Event = TextDelta | ToolCallStarted | ToolCallArguments | PromptShown | ChoiceFinished | Diagnostics


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over all choices. Durations in seconds."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    failovers: int = 0
    pause_s: float = 0.0
    nodes: tuple[str, ...] = ()
    exactness: Exactness = "bitwise"  # the weakest of all choices
    first_token_s: float = 0.0
    total_s: float = 0.0
