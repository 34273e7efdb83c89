"""How likely the tokens of a prompt were, from the hidden states of the positions before them: logits a few rows at a time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.engine.sampling import logprobs_of
from potluck.engine.shard_engine import Rounding, ShardEngine
from potluck.wire.prompt_scores import TokenScore


def score_rows(
    engine: ShardEngine, session: int, hidden: npt.NDArray[np.float32], following: Sequence[int], top: int,
    roundings: Sequence[Rounding] = (),
) -> list[TokenScore]:  # fmt: skip
    """`following[i]` is the token after row i; rows without one are left out. The arithmetic is that of chosen tokens."""
    scores: list[TokenScore] = []
    top = min(top, engine.facts.vocabulary_size)
    for first in range(0, len(following), engine.output_rows):
        tokens = following[first : first + engine.output_rows]
        for logits, token in zip(
            engine.project(session, hidden[first : first + len(tokens)], roundings), tokens, strict=True
        ):
            logprob, likeliest = logprobs_of(logits, token, top)
            scores.append(TokenScore(logprob, int(logits.argmax()) == token, likeliest))
    return scores
