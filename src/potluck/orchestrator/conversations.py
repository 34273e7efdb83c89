"""Answers whose keys and values the shards still keep, so that the next question of a conversation need not be read from its start.

What a shard keeps it may give up at any time; it says at OPEN how much is left. Nothing here is needed for an answer to be right:
keys and values of the same tokens are the same bits, whoever asked for them first. Pure; time comes in.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from potluck.orchestrator.request import GenerationRequest
from potluck.planner.cover import Candidate, Placed
from potluck.planner.shortest_path import holds
from potluck.wire.messages import Boundary, Resume

_MOST = 16
_KEEP_S = 540.0  # a little less than shards do
_LEAST_TOKENS = 16  # fewer are computed sooner than looked for


@dataclass(frozen=True)
class KeptAnswer:
    """`tokens` are the prompt and the answer; of the last the shards may have nothing. `scope`: whose it was."""

    scope: str
    weights_sha256: str
    arithmetic: int
    boundaries: tuple[Boundary, ...]
    tokens: tuple[int, ...]
    stages: tuple[Placed, ...]
    sessions: tuple[bytes, ...]
    until_s: float


@dataclass(frozen=True)
class Beginning:
    """The pipeline that has the first `length` tokens of a prompt already, and under which names."""

    stages: tuple[Placed, ...]
    sessions: tuple[bytes, ...]
    length: int

    def resumes(self) -> list[Resume]:
        return [Resume(session, self.length) for session in self.sessions]


class Conversations:
    """The last few answers of one head."""

    def __init__(self) -> None:
        self._kept: deque[KeptAnswer] = deque(maxlen=_MOST)

    def __repr__(self) -> str:
        return f"<Conversations {len(self._kept)}>"

    def put(
        self, scope: str, request: GenerationRequest, tokens: tuple[int, ...], stages: tuple[Placed, ...],
        sessions: tuple[bytes, ...], now_s: float,
    ) -> None:  # fmt: skip
        self._kept.append(
            KeptAnswer(
                scope, request.weights_sha256, request.arithmetic, request.boundaries, tokens, stages, sessions,
                now_s + _KEEP_S,
            )
        )  # fmt: skip

    def find(self, scope: str, request: GenerationRequest, now_s: float) -> list[Beginning]:
        """Where the prompt begins as an answer of the same scope did; the longest first, of equal ones the newest."""
        if request.prompt_logprobs is not None:
            return []  # every token of the prompt is wanted, so every one must be computed
        found = [
            Beginning(kept.stages, kept.sessions, length)
            for kept in reversed(self._kept)
            if self._fits(kept, scope, request, now_s)
            and (length := common_length(kept.tokens, request.prompt)) >= _LEAST_TOKENS
        ]
        return sorted(found, key=lambda beginning: -beginning.length)

    @staticmethod
    def _fits(kept: KeptAnswer, scope: str, request: GenerationRequest, now_s: float) -> bool:
        model = (request.weights_sha256, request.arithmetic, request.boundaries)
        return kept.scope == scope and now_s < kept.until_s and model == (
            kept.weights_sha256, kept.arithmetic, kept.boundaries,
        )  # fmt: skip


def are_offered(stages: Iterable[Placed], candidates: Sequence[Candidate]) -> bool:
    """Whether every stage is still served where it was."""
    return all(
        any(each.node == placed.node and holds(each.stage, placed.stage) for each in candidates) for placed in stages
    )


def common_length(tokens: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """How many tokens both begin with; not all of the prompt, whose last token must be computed to choose the next."""
    most = min(len(tokens), len(prompt) - 1)
    return next((place for place in range(most) if tokens[place] != prompt[place]), most)
