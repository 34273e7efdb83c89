"""Streaming: nothing halved, nothing taken back, nothing lost; stop strings wherever the tokens cut them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import BadRequest
from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, USER_DEFINED, TokenizerSpec
from potluck.text.byte_characters import bytes_to_characters
from potluck.text.detokenizer import StopMatcher, StreamingDetokenizer
from potluck.text.tokenizer import Tokenizer

# Every byte is a token, so that every byte sequence, valid or not, is a token sequence.
BYTES = Tokenizer(
    TokenizerSpec(
        algorithm="byte_bpe",
        tokens=(*(bytes_to_characters(bytes([byte])) for byte in range(256)), "<|end|>", "<tool>"),
        kinds=(*[NORMAL] * 256, CONTROL, USER_DEFINED),
    )
)
PIECES = Tokenizer(
    TokenizerSpec(
        algorithm="sentencepiece",
        tokens=(*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "▁", "▁a", "a", "▁▁b"),
        kinds=(*[BYTE] * 256, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL),
        scores=(0.0,) * 261,
        adds_space_prefix=True,
    )
)


@settings(max_examples=300)
@given(
    tokenizer=st.sampled_from([BYTES, PIECES]),
    ids=st.lists(st.integers(0, 257), max_size=40),
    skip_special=st.booleans(),
    continues_text=st.booleans(),
)
def test_the_stream_joined_is_the_text(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool, continues_text: bool
) -> None:
    stream = StreamingDetokenizer(tokenizer, skip_special=skip_special, continues_text=continues_text)
    parts = [stream.push(token_id) for token_id in ids] + [stream.finish()]
    assert "".join(parts) == tokenizer.decode(ids, skip_special=skip_special, continues_text=continues_text)


@given(st.text())
def test_valid_text_comes_character_by_character(text: str) -> None:
    stream = StreamingDetokenizer(BYTES)
    seen = ""
    for byte in text.encode("utf-8"):
        seen += stream.push(byte)
        assert text.startswith(seen)
        assert "\ufffd" not in seen or "\ufffd" in text
    assert seen == text
    assert stream.finish() == ""


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = StreamingDetokenizer(BYTES)
    assert [stream.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.push(0xF0) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = [ord("a"), 256, 257, ord("b")]
    hidden, shown = StreamingDetokenizer(BYTES), StreamingDetokenizer(BYTES, skip_special=False)
    assert [hidden.push(i) for i in ids] == ["a", "", "<tool>", "b"]
    assert [shown.push(i) for i in ids] == ["a", "<|end|>", "<tool>", "b"]


def test_only_the_first_space_of_sentencepiece_goes() -> None:
    stream = StreamingDetokenizer(PIECES)
    assert [stream.push(i) for i in (256, 258, 258, 260)] == ["", "a", " a", "  b"]
    continued = StreamingDetokenizer(PIECES, continues_text=True)
    assert [continued.push(i) for i in (256, 258, 258)] == ["", " a", " a"]


def test_a_stop_across_tokens_is_found_and_never_shown() -> None:
    matcher = StopMatcher(["\nUser:", "###"])
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("Us") == ("", None)
    assert matcher.push("ual#") == ("\nUsual", None)
    assert matcher.push("#\nUs") == ("##", None)
    assert matcher.push("er: hi") == ("", "\nUser:")
    assert matcher.is_stopped
    assert matcher.push("more") == ("", "\nUser:")
    assert matcher.finish() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("do not sto") == ("do not ", None)
    assert matcher.finish() == "sto"


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).push("anything") == ("anything", None)


@pytest.mark.parametrize("stops", [[""], ["x" * 5000], ["x"] * 65])
def test_stops_that_are_none(stops: list[str]) -> None:
    with pytest.raises(BadRequest):
        StopMatcher(stops)


def plain_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The obviously right way: the first place where a stop ends; of several, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400)
@given(
    text=st.text("ab\n", max_size=60),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    seed=st.integers(0, 1 << 30),
)
def test_the_cutting_makes_no_difference(text: str, stops: list[str], seed: int) -> None:
    matcher, chosen, position, shown = StopMatcher(stops), random.Random(seed), 0, ""
    stop = None
    while position < len(text) and stop is None:
        size = chosen.randint(1, 5)
        part, stop = matcher.push(text[position : position + size])
        shown, position = shown + part, position + size
    assert (shown + matcher.finish(), stop) == plain_search(text, stops)
