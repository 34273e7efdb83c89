"""Where in the text the tokens of a completion stand: by characters, the same streamed and whole, with the prompt echoed or not."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.gateway.choice import ChoiceSettings, ChoiceStream
from potluck.gateway.events import TextDelta
from potluck.orchestrator.frames import PromptLogprob, PromptLogprobs, TokenDelta
from potluck.testing.memory_answering import MemoryAnswering, byte_tokenizer
from potluck.text.tokenizer import Tokenizer
from tests.support.api import app_of, events_of, post

TOKENIZER = byte_tokenizer()
FIRST_BYTE = TOKENIZER.vocabulary_size - 256


def complete(answering: MemoryAnswering, **fields: object) -> Any:
    return post(app_of(answering), "/v1/completions", {"prompt": "Once", "logprobs": 1, "max_tokens": 100, **fields})


def streamed(answering: MemoryAnswering, **fields: object) -> tuple[str, list[int]]:
    choices = [
        data["choices"][0] for _, data in events_of(complete(answering, stream=True, **fields)) if data != "[DONE]"
    ]
    offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    return "".join(choice["text"] for choice in choices), offsets


def whole(answering: MemoryAnswering, **fields: object) -> tuple[str, list[int]]:
    [choice] = complete(answering, **fields).json()["choices"]
    return choice["text"], choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("text", "offsets"),
    [("abc", [0, 1, 2]), ("😀😃", [0] * 4 + [1] * 4), ("é, 😀!", [0, 0, 1, 2, 3, 3, 3, 3, 4])],
)
def test_a_token_that_is_part_of_a_character_stands_where_the_character_does(text: str, offsets: list[int]) -> None:
    assert whole(MemoryAnswering(text)) == (text, offsets)
    assert streamed(MemoryAnswering(text)) == (text, offsets)


def test_the_tokens_of_an_echoed_prompt_are_counted_the_same_way_and_those_of_the_answer_after_them() -> None:
    answering = MemoryAnswering("é!")
    told = tuple(PromptLogprob(token, -0.5, True) for token in tokens_of("ö😀".encode())[1:])
    answering.model.frames_before = {0: [PromptLogprobs(told)]}
    assert whole(answering, prompt="ö😀", echo=True) == ("ö😀é!", [0, 0, 1, 1, 1, 1, 2, 2, 3])


def test_the_mark_of_a_texts_beginning_is_not_echoed_and_takes_no_room() -> None:
    answering = MemoryAnswering("é!")
    model = answering.model
    model.tokenizer = Tokenizer(msgspec.structs.replace(model.tokenizer.spec, adds_bos=True))
    told = tuple(PromptLogprob(token, -0.5, True) for token in tokens_of("ö😀".encode()))
    model.frames_before = {0: [PromptLogprobs(told)]}
    assert whole(answering, prompt="ö😀", echo=True) == ("ö😀é!", [0, 0, 0, 1, 1, 1, 1, 2, 2, 3])
    assert model.requests[-1].prompt[0] == model.tokenizer.spec.bos_id


def test_a_prompt_can_be_scored_without_an_answer() -> None:
    answering = MemoryAnswering("never seen")
    told = tuple(PromptLogprob(token, -0.5, True) for token in tokens_of(b"bc"))
    answering.model.frames_before = {0: [PromptLogprobs(told)]}
    answer = complete(answering, prompt="abc", echo=True, max_tokens=0).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": None}, {"echo": False}])
def test_no_tokens_are_an_answer_only_where_the_prompt_is_scored(fields: dict[str, object]) -> None:
    refused = complete(MemoryAnswering("never seen"), max_tokens=0, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def tokens_of(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def starts_of(data: bytes) -> tuple[str, list[int]]:
    stream = ChoiceStream(0, TOKENIZER, ChoiceSettings(wants_logprobs=True))
    events = [e for place, token in enumerate(tokens_of(data)) for e in stream.push(TokenDelta(token, place, -0.5))]
    deltas = [event for event in [*events, *stream.finish("stop")] if isinstance(event, TextDelta)]
    return "".join(delta.text for delta in deltas), [one.start for delta in deltas for one in delta.logprobs]


PIECES = [
    b"a",
    "é".encode(),
    "😀".encode(),
    "\ufffd".encode(),
    b"\xf0\x9f",
    b"\xff",
    b"\x80",
    b"\xe0\x80",
    b"\xed\xa0",
    b"\xc3",
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_bytes_that_are_no_character_are_counted_as_the_marks_that_stand_for_them(data: bytes) -> None:
    """By another count: a byte belongs to the last character of all that is text, or replaced, up to it."""
    text, starts = starts_of(data)
    assert text == data.decode("utf-8", errors="replace")
    assert starts == [len(data[: place + 1].decode("utf-8", errors="replace")) - 1 for place in range(len(data))]
