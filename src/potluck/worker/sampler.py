"""A session's token history and the choice of its next token. The engine's `choose` does the arithmetic.

The token of position p is history[p]. Keys and values of a session of length L are those of positions 0 … L-1, so its history has L
tokens, or L + 1 where the next one has been chosen already; the prompt is known from the start.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadRequest
from potluck.engine.sampling import Chosen, choose
from potluck.wire.messages import Sampler


class TokenChooser:
    """Remembers what was chosen; raises BadRequest rather than choose without knowing all tokens before."""

    def __init__(self, sampler: Sampler, vocabulary_size: int) -> None:
        self._params = sampler.params.check()
        self._choice, self._limit = sampler.choice, sampler.limit
        self._prompt_length = sampler.prompt_length
        self.history = list(sampler.history)
        if len(self.history) < self._prompt_length:
            raise BadRequest(f"a prompt of {self._prompt_length} tokens, but only {len(self.history)} were sent")
        if self.history and max(self.history) >= vocabulary_size:
            raise BadRequest(f"the history holds token ids past this model's last, {vocabulary_size - 1}")

    def __repr__(self) -> str:
        return f"<TokenChooser {len(self.history)} tokens known, {self._prompt_length} of them the prompt>"

    def learn(self, position: int, tokens: Sequence[int]) -> None:
        """Token ids that came with a step are what was computed with: where history differs, it is history that is wrong."""
        if position <= len(self.history) and self.history[position : position + len(tokens)] != list(tokens):
            self.history[position:] = tokens

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token with the largest logit is the choice, and nothing else is asked."""
        params = self._params
        is_plain = params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0
        return params.temperature == 0.0 and is_plain and not params.logit_bias and params.logprobs is None

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> Chosen | None:
        """The token for `position`, which is remembered; None from the session's limit on."""
        if position >= self._limit:
            return None
        self._require_history(position)
        prompt, generated = self.history[: self._prompt_length], self.history[self._prompt_length : position]
        chosen = choose(
            logits, self._params, choice=self._choice, position=position, prompt=prompt, generated=generated
        )
        self.history[position:] = [chosen.token]
        return chosen

    def take(self, likeliest: int, position: int) -> Chosen | None:
        """Like `choose`, where an engine has found the largest logit already; -1 where one is not a number."""
        if position >= self._limit:
            return None
        self._require_history(position)
        if likeliest < 0:
            raise BadRequest("logits contain values that are not numbers")
        self.history[position:] = [likeliest]
        return Chosen(likeliest)

    def _require_history(self, position: int) -> None:
        if not self._prompt_length <= position <= len(self.history):
            raise BadRequest(
                f"cannot choose for position {position}: the prompt has {self._prompt_length} tokens "
                f"and {len(self.history)} are known"
            )

    def truncate(self, length: int) -> None:
        """Back to `length` positions: what followed the next token is forgotten, the prompt never is."""
        del self.history[max(self._prompt_length, length + 1) :]
