"""Tool calls in streamed text: every syntax, however the text is cut, and never half a marker as text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.text.tool_calls import CallArguments, CallStarted, Piece, ToolCallParser

NAMES = ("weather", "add")
HERMES = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo } \\" {"}}\n</tool_call>'
TWO_HERMES = HERMES + '\n<tool_call>{"name": "add", "arguments": {"a": [1, {"b": 2}]}}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "add", "arguments": {}}]'
BACKWARDS = '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>'
NESTED = '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}'


def read(chunks: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = ToolCallParser(NAMES)
    pieces: list[Piece] = [piece for chunk in chunks for piece in parser.push(chunk)] + parser.finish()
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, CallStarted):
            assert piece.index not in names
            names[piece.index] = piece.name
            arguments[piece.index] = ""
        elif isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    return text, [(names[i], json.loads(arguments[i])) for i in sorted(names)]


CASES = {
    HERMES: ("Let me see.\n", [("weather", {"city": 'Oslo } " {'})]),
    TWO_HERMES: ("Let me see.\n", [("weather", {"city": 'Oslo } " {'}), ("add", {"a": [1, {"b": 2}]})]),
    LLAMA: ("", [("weather", {"city": "Oslo"})]),
    MISTRAL: ("", [("weather", {"city": "Oslo"}), ("add", {})]),
    BACKWARDS: ("", [("weather", {"city": "Oslo"})]),
    NESTED: ("", [("add", {"a": 1})]),
    "<|python_tag|>" + LLAMA: ("", [("weather", {"city": "Oslo"})]),
    "plain < text [TOOL": ("plain < text [TOOL", []),
    '{"city": "Oslo"} is JSON': ('{"city": "Oslo"} is JSON', []),
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
    '<tool_call>{"name": "wea': ('<tool_call>{"name": "wea', []),
    "": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_calls_are_found_in_one_piece_and_letter_by_letter(text: str) -> None:
    assert read([text]) == CASES[text]
    assert read(list(text)) == CASES[text]


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(1, 7), max_size=200))
def test_however_the_text_is_cut_the_result_is_the_same(text: str, lengths: list[int]) -> None:
    chunks, rest = [], text
    for length in lengths:
        chunks.append(rest[:length])
        rest = rest[length:]
    assert read([*chunks, rest]) == CASES[text]


@given(st.text(alphabet='<tool_cal>/{}[]"TOOL_CALLS nameweather:,\\', max_size=120))
def test_whatever_comes_nothing_is_lost_unless_it_is_a_call(text: str) -> None:
    shown, calls = ToolCallParser(NAMES), []
    pieces = [piece for character in text for piece in shown.push(character)] + shown.finish()
    calls = [piece for piece in pieces if not isinstance(piece, str)]
    if not calls and "<tool_call>" not in text and "[TOOL_CALLS]" not in text:
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == text


def test_arguments_are_handed_out_as_they_come() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push('<tool_call>{"name": "weather", "arguments": {"ci') == [
        CallStarted(0, "weather"),
        CallArguments(0, '{"ci'),
    ]
    assert parser.push('ty": "O') == [CallArguments(0, 'ty": "O')]


def test_an_answer_cut_off_inside_the_arguments_ends_there() -> None:
    parser = ToolCallParser(NAMES)
    parser.push('<tool_call>{"name": "weather", "arguments": {"ci')
    assert parser.finish() == []
