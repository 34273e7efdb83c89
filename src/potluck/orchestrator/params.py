"""What the caller of a request decides about the way it takes."""

from collections.abc import Callable
from typing import Literal

import msgspec

from potluck.core.limits import ARITHMETIC_VERSION, MAX_SHARDS_PER_REQUEST
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings, StepTiming
from potluck.planner.cover import Placed
from potluck.wire.messages import Codec, Stage


class DistributedChatParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request uses the pipeline; the generation's own settings, and limits of the caller."""

    settings: GenerationSettings = GenerationSettings()
    fallback_to_local: bool = True
    max_shards_per_request: int = MAX_SHARDS_PER_REQUEST
    own_layers: tuple[Stage, ...] = ()  # this node's own ends of the model, which it serves itself
    own_arithmetic: int = ARITHMETIC_VERSION  # that it computes them by
    pipeline: tuple[Placed, ...] = ()  # exactly these stages, instead of a choice
    allow_self_as_shard: bool = False  # whether this node's own shards count as any other's
    activation_dtype: Codec | Literal["auto"] = "auto"  # between stages, where a request names no boundaries
    label: str = ""  # what people see the request as
    on_timing: Callable[[StepTiming], None] | None = None  # told of every token's way round
    on_begun: Callable[[GenerationRequest], None] | None = (
        None  # told the request as it is carried out, boundaries and all
    )
    on_stages: Callable[[tuple[Placed, ...]], None] | None = None  # told who takes part, again after each change

    @property
    def own_place(self) -> Literal["last", "equal"]:
        return "equal" if self.allow_self_as_shard else "last"

    @property
    def allows_own(self) -> bool:
        """Whether this node's own shards may be used at all."""
        return self.fallback_to_local or self.allow_self_as_shard
