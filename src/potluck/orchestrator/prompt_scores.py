"""Puts a prompt's log probabilities together from the chunks that come back, in order, none twice. Without I/O."""

from collections.abc import Sequence

from potluck.orchestrator.frames import PromptLogprob, PromptLogprobs
from potluck.wire.prompt_scores import decode_scores, most_positions


class PromptScores:
    """`top` None: none are wanted, and none are taken. Survives failovers as the journal does: what is here is not asked for again."""

    def __init__(self, prompt: Sequence[int], top: int | None, vocabulary_size: int) -> None:
        self._prompt, self._vocabulary_size = prompt, vocabulary_size
        self._top = None if top is None else min(top, vocabulary_size)
        self._scored: list[PromptLogprob] = []
        self._is_told = top is None

    def __repr__(self) -> str:
        return f"<PromptScores {len(self._scored)} of {len(self._prompt) - 1}>"

    @property
    def most_positions(self) -> int | None:
        """How long a chunk may be; None where it does not matter."""
        return None if self._top is None else most_positions(self._top)

    def take(self, position: int, data: bytes) -> None:
        """What came with the result for `position`. Raises ProtocolViolation where that is not what is due."""
        due = 0 if self._top is None else max(0, min(position, len(self._prompt) - 1) - len(self._scored))
        if due == 0 and not data:
            return  # as with every token that is generated
        scores = decode_scores(data, due, self._top or 0, self._vocabulary_size)
        for score in scores:
            token = self._prompt[len(self._scored) + 1]
            self._scored.append(PromptLogprob(token, score.logprob, score.is_greedy, score.top))

    def frame(self) -> PromptLogprobs | None:
        """Once, when all are known; the prompt's first token has none, nothing comes before it."""
        if self._is_told or len(self._scored) < len(self._prompt) - 1:
            return None
        self._is_told = True
        return PromptLogprobs(tuple(self._scored))
