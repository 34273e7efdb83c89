"""A session's token history and the choice of its next token. The engine's `choose` does the arithmetic.

The token of position p is history[p]. Keys and values of a session of length L are those of positions 0 … L-1, so its history has L
tokens, or L + 1 where the next one has been chosen already; the prompt is known from the start.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadGrammar, BadRequest
from potluck.core.sampling_params import SamplingParams
from potluck.engine.sampling import Chosen, choose, not_numbers
from potluck.text.grammar import GrammarCompiler, GrammarMatcher
from potluck.wire.messages import Sampler
from potluck.wire.prompt_scores import TokenScore, encode_scores


class TokenChooser:
    """Remembers what was chosen; raises BadRequest rather than choose without knowing all tokens before."""

    def __init__(self, sampler: Sampler, vocabulary_size: int, grammars: GrammarCompiler | None = None) -> None:
        self._params = sampler.params.check()
        self._choice, self._limit = sampler.choice, sampler.limit
        self._prompt_length = sampler.prompt_length
        self._prompt_logprobs = sampler.prompt_logprobs
        self._vocabulary_size = vocabulary_size
        self.history = list(sampler.history)
        if len(self.history) < self._prompt_length:
            raise BadRequest(f"a prompt of {self._prompt_length} tokens, but only {len(self.history)} were sent")
        if self.history and max(self.history) >= vocabulary_size:
            raise BadRequest(f"the history holds token ids past this model's last, {vocabulary_size - 1}")
        if any(token >= vocabulary_size for token in self._params.logit_bias):
            raise BadRequest(f"logit_bias names token ids past this model's last, {vocabulary_size - 1}")
        self._matcher = self._new_matcher(sampler, grammars)
        # Whether the token with the largest logit is the choice, and nothing else is asked.
        self.takes_likeliest = self._matcher is None and _is_plainly_greedy(self._params)

    def _new_matcher(self, sampler: Sampler, grammars: GrammarCompiler | None) -> GrammarMatcher | None:
        if sampler.grammar is None:
            return None
        if grammars is None:
            raise BadGrammar("this model has no tokenizer, so no answer can be held to a grammar")
        return grammars.matcher(sampler.grammar, self.history[self._prompt_length :])

    def __repr__(self) -> str:
        return f"<TokenChooser {len(self.history)} tokens known, {self._prompt_length} of them the prompt>"

    def learn(self, position: int, tokens: Sequence[int]) -> None:
        """Token ids that came with a step are what was computed with: where history differs, it is history that is wrong."""
        if position <= len(self.history) and self.history[position : position + len(tokens)] != list(tokens):
            self.history[position:] = tokens

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> Chosen | None:
        """The token for `position`, which is remembered; None from the session's limit on."""
        if position >= self._limit:
            return None
        self._require_history(position)
        prompt, generated = self.history[: self._prompt_length], self.history[self._prompt_length : position]
        mask = None
        if self._matcher is not None:
            self._matcher.advance_to(generated)  # which may be back: after a cut the history is shorter, or another one
            mask = self._matcher.allowed()
        chosen = choose(
            logits, self._params, choice=self._choice, position=position, prompt=prompt, generated=generated, mask=mask
        )
        self.history[position:] = [chosen.token]
        return chosen

    def score(self, position: int, count: int, scored: Callable[[Sequence[int], int], list[TokenScore]]) -> bytes:
        """Scores, by `scored(tokens, top)`, of the prompt's tokens that positions from `position` on predict, for the wire."""
        if self._prompt_logprobs is None:
            raise BadRequest("this session wants no scores of its prompt")
        following = self.history[position + 1 : min(position + 1 + count, self._prompt_length)]
        top = min(self._prompt_logprobs, self._vocabulary_size)
        return encode_scores(scored(following, top), top)

    def take(self, likeliest: int, position: int) -> Chosen | None:
        """Like `choose`, where an engine has found the largest logit already; -1 where one is not a number."""
        if position >= self._limit:
            return None
        self._require_history(position)
        if likeliest < 0:
            raise not_numbers()
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


def _is_plainly_greedy(params: SamplingParams) -> bool:
    is_plain = params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0
    return params.temperature == 0.0 and is_plain and not params.logit_bias and params.logprobs is None
