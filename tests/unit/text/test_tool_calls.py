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
    **{text: (text, []) for text in (
        "", "<tool_call>", "<tool_call>\n", "The tag <tool_call> is a function called `<tool_call>`.", "<tool_call>\n</tool_call>",
        "[TOOL_CALLS] is a Python list", "[TOOL_CALLS] [see docs]", "[TOOL_CALLS][", "<tool_call></tool_", "<|python_tag|> print(1)",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]',
        '{"name": ["weather"], "arguments": {}}', '{"name": {}, "arguments": {}}',
        '<tool_call> {"name": "wea', '\n {"name": "unknown", "arguments": {}}',
    )},
    LLAMA + " [see] more": ("[see] more", [("weather", {"city": "Oslo"})]),
    LLAMA + ', {"a": 1}': (', {"a": 1}', [("weather", {"city": "Oslo"})]),
    LLAMA + " <": ("<", [("weather", {"city": "Oslo"})]),
    LLAMA + "; " + LLAMA: ("", [("weather", {"city": "Oslo"})] * 2),
    MISTRAL + " [so] it is": ("[so] it is", [("weather", {"city": "Oslo"}), ("add", {})]),
    "[TOOL_CALLS] " + MISTRAL: ("[TOOL_CALLS] ", [("weather", {"city": "Oslo"}), ("add", {})]),
    "<tool_call> " + BACKWARDS: ("<tool_call> ", [("weather", {"city": "Oslo"})]),
    BACKWARDS[:-1]: ("", [("weather", {"city": "Oslo"})]),
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_calls_are_found_in_one_piece_and_letter_by_letter(text: str) -> None:
    assert read([text]) == CASES[text]
    assert read(list(text)) == CASES[text]


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(1, 7), max_size=200))
def test_however_the_text_is_cut_the_result_is_the_same(text: str, lengths: list[int]) -> None:
    assert read(cut(text, lengths)) == CASES[text]


def cut(text: str, lengths: list[int]) -> list[str]:
    chunks = []
    for length in lengths:
        chunks.append(text[:length])
        text = text[length:]
    return [*chunks, text]


WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "_call>", "[TOOL", "<", "[", "]", "{", "}", ",", ";",
    " ", "\n", "\t", "see", "docs", '"', "\\", '{"name": "other", "arguments": {"a": 1}}', '{"name": "other", "param', '": {}}',
    '{"a": [1]}', '{"name": ["weather"], "arguments": {}}', '{"name": "weather"}', '{"arguments": {}, "name": "other"}',
]  # fmt: skip
CALLS = ['{"name": "weather", "arguments": {"a": 1}}', '{"parameters": {}, "name": "add"}']
CUTS = st.lists(st.integers(0, 12), max_size=60)


@given(st.lists(st.sampled_from(WORDS), max_size=20).map("".join), CUTS)
def test_what_is_no_call_of_a_known_tool_is_text_to_the_last_character(text: str, lengths: list[int]) -> None:
    assert read(cut(text, lengths)) == (text, [])


@given(st.lists(st.sampled_from(WORDS + CALLS), max_size=20).map("".join), CUTS)
def test_markers_calls_and_text_in_any_order_read_the_same_in_any_pieces(text: str, lengths: list[int]) -> None:
    whole = read([text])
    assert read(cut(text, lengths)) == whole
    assert read(list(text)) == whole


@given(st.text(alphabet='<tool_cal>/{}[]"TOOL_CALLS nameweather:,\\', max_size=120))
def test_whatever_comes_nothing_is_lost_unless_it_is_a_call(text: str) -> None:
    shown, calls = read(list(text))
    assert shown == text or calls


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
