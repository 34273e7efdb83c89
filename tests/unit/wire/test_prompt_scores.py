"""Scores of a prompt on the wire: back as they were, or refused."""

import struct

import pytest

from potluck.core.errors import ProtocolViolation
from potluck.wire.frames import URGENT_BYTES
from potluck.wire.prompt_scores import TokenScore, decode_scores, encode_scores, most_positions

SCORES = [TokenScore(-0.1, True, ((5, -0.1), (7, -2.5))), TokenScore(-31.7, False, ((0, -0.2), (1, -0.2)))]


def test_scores_come_back_as_they_were() -> None:
    assert decode_scores(encode_scores(SCORES, 2), 2, 2, 8) == SCORES
    bare = [TokenScore(score.logprob, score.is_greedy) for score in SCORES]
    assert decode_scores(encode_scores(bare, 0), 2, 0, 8) == bare
    assert decode_scores(b"", 0, 20, 8) == []


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_longest_chunk_fits_into_a_message_that_is_not_overtaken(top: int) -> None:
    score = TokenScore(-1.0, False, tuple((token, -1.0) for token in range(top)))
    assert len(encode_scores([score] * most_positions(top), top)) <= URGENT_BYTES


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_scores_is_refused(count: int) -> None:
    with pytest.raises(ProtocolViolation, match="not the scores of"):
        decode_scores(encode_scores(SCORES, 2), count, 2, 8)


@pytest.mark.parametrize("value", [float("nan"), 0.5, float("inf")])
@pytest.mark.parametrize("offset", [0, 17])
def test_what_is_no_log_probability_is_refused(value: float, offset: int) -> None:
    data = bytearray(encode_scores(SCORES, 2))
    data[offset : offset + 8] = struct.pack("<d", value)
    with pytest.raises(ProtocolViolation, match="no log probabilities"):
        decode_scores(bytes(data), 2, 2, 8)


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="tokens that the model does not have"):
        decode_scores(encode_scores(SCORES, 2), 2, 2, 7)
