"""Log probabilities of a prompt's tokens, as the body of the RESULT for a chunk of it. Plain numpy; no I/O.

The chunk that computes positions start … stop - 1 scores the tokens of positions start + 1 … stop, as far as the prompt goes: each is
predicted by the position before it, so that no chunk needs anything of another.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from potluck.core.errors import ProtocolViolation

MOST_BYTES = 48 << 10  # in one message: those that are no longer than 64 KiB do not overtake each other


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was. `is_greedy`: none was likelier. `top`: the likeliest tokens there, ties by id."""

    logprob: float
    is_greedy: bool
    top: tuple[tuple[int, float], ...] = ()


def _row(top: int) -> np.dtype[np.void]:
    fields = [("logprob", "<f8"), ("is_greedy", "u1"), ("tokens", "<i4", (top,)), ("logprobs", "<f8", (top,))]
    return np.dtype(fields)


def most_positions(top: int) -> int:
    """How many positions a chunk may have so that its scores fit into one short message."""
    return MOST_BYTES // _row(top).itemsize


def encode_scores(scores: Sequence[TokenScore], top: int) -> bytes:
    rows = np.zeros(len(scores), _row(top))
    for row, score in zip(rows, scores, strict=True):
        row["logprob"], row["is_greedy"] = score.logprob, score.is_greedy
        row["tokens"] = [token for token, _ in score.top]
        row["logprobs"] = [logprob for _, logprob in score.top]
    return rows.tobytes()


def decode_scores(data: bytes, count: int, top: int, vocabulary_size: int) -> list[TokenScore]:
    """Exactly `count` scores. Raises ProtocolViolation for anything else, and for what is no log probability or no token."""
    kind = _row(top)
    if len(data) != count * kind.itemsize:
        raise ProtocolViolation(f"{len(data)} bytes are not the scores of {count} tokens")
    rows = np.frombuffer(data, kind)
    # Written so that what is not a number fails as well.
    if not ((rows["logprob"] <= 1e-3).all() and (rows["logprobs"] <= 1e-3).all() and (rows["is_greedy"] <= 1).all()):
        raise ProtocolViolation("the scores of a prompt are no log probabilities")
    if not ((rows["tokens"] >= 0) & (rows["tokens"] < vocabulary_size)).all():
        raise ProtocolViolation("the scores of a prompt name tokens that the model does not have")
    return [
        TokenScore(logprob, bool(is_greedy), tuple(zip(tokens, logprobs, strict=True)))
        for logprob, is_greedy, tokens, logprobs in zip(
            rows["logprob"].tolist(), rows["is_greedy"].tolist(), rows["tokens"].tolist(), rows["logprobs"].tolist(),
            strict=True,
        )
    ]  # fmt: skip
