"""What is remembered of answers whose head is gone: bounded in number, bytes and time, and found by the secret alone."""

import pytest

from potluck.core.remembered import (
    AnswerSoFar,
    RememberedAnswers,
    answer_proof,
    key_behind,
    packed_tokens,
    resume_key,
    unpacked_tokens,
)


def key(number: int) -> bytes:
    return resume_key(number.to_bytes(16, "little"))


def answer(*tokens: int, prompt: int = 1) -> AnswerSoFar:
    return AnswerSoFar(prompt, tokens)


def test_an_answer_is_found_by_its_key_and_by_no_other() -> None:
    remembered = RememberedAnswers()
    remembered.put(key(1), answer(5, 6, 7), 0.0)
    found = remembered.get(key(1), 1.0)
    assert found is not None
    assert (found.prompt, found.chosen) == ((5,), (6, 7))
    assert remembered.get(key(2), 1.0) is None
    assert remembered.get(b"", 1.0) is None


def test_it_is_forgotten_after_its_time() -> None:
    remembered = RememberedAnswers(lifetime_s=60.0)
    remembered.put(key(1), answer(5, 6), 100.0)
    assert remembered.get(key(1), 159.9) is not None
    assert remembered.get(key(1), 160.0) is None
    assert (len(remembered), remembered.used_bytes) == (0, 0)


def test_the_oldest_go_first_where_there_are_too_many() -> None:
    remembered = RememberedAnswers(most=3)
    for number in range(5):
        remembered.put(key(number), answer(number, 9), float(number))
    assert [number for number in range(5) if remembered.get(key(number), 5.0) is not None] == [2, 3, 4]


def test_the_oldest_go_first_where_they_are_too_large() -> None:
    remembered = RememberedAnswers(most_bytes=40)
    for number in range(5):
        remembered.put(key(number), answer(*range(4)), float(number))
    assert remembered.used_bytes == 32
    assert [number for number in range(5) if remembered.get(key(number), 5.0) is not None] == [3, 4]
    remembered.put(key(9), answer(*range(11)), 6.0)  # alone more than all may be
    assert remembered.get(key(9), 6.0) is None
    assert len(remembered) == 2


def test_of_two_accounts_the_longer_one_stays() -> None:
    remembered = RememberedAnswers()
    for tokens in ((1, 2), (1, 2, 3), (1,)):
        remembered.put(key(1), answer(*tokens), 0.0)
    assert remembered.get(key(1), 0.0) == answer(1, 2, 3)
    assert remembered.used_bytes == 12


@pytest.mark.parametrize("tokens", [(), (0,), (1, 2**31 - 1, 77)])
def test_tokens_travel_as_little_endian_numbers(tokens: tuple[int, ...]) -> None:
    assert unpacked_tokens(packed_tokens(tokens)) == tokens
    assert packed_tokens(tokens) == b"".join(token.to_bytes(4, "little") for token in tokens)


def test_a_proof_holds_for_its_key_its_asker_and_its_holder_alone() -> None:
    asker, holder, keys = b"a" * 32, b"h" * 32, [key(1), key(2), key(3)]
    proof = answer_proof(key(2), asker, holder)
    assert key_behind(proof, keys, asker, holder) == key(2)
    assert key_behind(proof, [key(1), key(3)], asker, holder) is None
    assert key_behind(proof, keys, b"b" * 32, holder) is None  # who passes it on as its own
    assert key_behind(proof, keys, asker, b"i" * 32) is None  # who was asked, and asks another
    assert key_behind(proof, keys, holder, asker) is None
    assert key_behind(bytes(32), keys, asker, holder) is None


def test_the_keys_of_what_is_remembered_still() -> None:
    remembered = RememberedAnswers(lifetime_s=60.0)
    remembered.put(key(1), answer(5, 6), 0.0)
    remembered.put(key(2), answer(5, 6), 50.0)
    assert remembered.keys(59.0) == [key(1), key(2)]
    assert remembered.keys(61.0) == [key(2)]
