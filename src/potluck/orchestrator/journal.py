"""What must survive whatever breaks: the prompt, the tokens accepted since, and how far all stages are known to have them. Pure.

Knows which result is due and what a right one looks like; not who sends it, nor what becomes of a pipeline that sends another.
"""

from potluck.core.errors import ProtocolViolation
from potluck.orchestrator.prompt_scores import PromptScores
from potluck.orchestrator.request import GenerationRequest
from potluck.wire.messages import Result, Sampler


def _are_logprobs(message: Result, vocabulary_size: int) -> bool:
    if message.logprob is None and not message.top:
        return True  # as nearly always
    told = [logprob for _, logprob in message.top] + ([] if message.logprob is None else [message.logprob])
    # Written so that what is not a number fails as well; a little above zero is rounding.
    return all(logprob <= 1e-3 for logprob in told) and all(token < vocabulary_size for token, _ in message.top)


class Journal:
    """Grows by one token at a time, and never shrinks: what is in it has been delivered."""

    def __init__(self, request: GenerationRequest, reused: int = 0) -> None:
        """`reused`: so many positions of the prompt are with the shards already, as far as one knows."""
        self._request = request
        self.tokens = [*request.prompt, *request.begun]
        self.confirmed = reused  # positions that every stage is known to have
        self.reused = reused
        self.scores = PromptScores(request.prompt, request.prompt_logprobs, request.vocabulary_size)

    def __repr__(self) -> str:
        return f"<Journal {len(self.tokens)} tokens, {self.confirmed} confirmed>"

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self._request.prompt) :]

    def is_next(self, message: Result, sent: int) -> bool:
        """A token belongs right after the journal; a chunk without one lies within what was sent, before the journal's end."""
        if message.token is not None:
            return message.position == len(self.tokens) > self.confirmed
        # The journal's end comes with a token, if any is wanted.
        last = len(self.tokens) - (1 if self._request.max_tokens else 0)
        return self.confirmed < message.position <= min(sent, last)

    def problem_with(self, message: Result, body: bytes) -> str | None:
        """What is wrong with a result, if anything; the scores that come with a right one are kept."""
        if message.token is not None and message.token >= self._request.vocabulary_size:
            return f"chose token {message.token}, which the model does not have"
        if not _are_logprobs(message, self._request.vocabulary_size):
            return "told log probabilities that are none"
        try:
            self.scores.take(message.position, body)
        except ProtocolViolation as error:
            return str(error)
        return None

    @property
    def has_prompt_left(self) -> bool:
        """Whether more than the last token has yet to go through every stage."""
        return self.confirmed + 1 < len(self.tokens)

    def sampler(self) -> Sampler:
        """All that the next choice depends on: whoever samples from here on chooses what anybody would have chosen."""
        request = self._request
        limit = len(request.prompt) + request.max_tokens
        return Sampler(
            request.params, request.choice, len(request.prompt), tuple(self.tokens), request.eos, limit, request.grammar,
            request.prompt_logprobs,
        )  # fmt: skip
