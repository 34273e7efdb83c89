"""Calls that must be made: what the grammar lets a model write, whatever the tools' schemas refer to."""

import json
from typing import Any

import pytest

from potluck.core.errors import BadGrammar
from potluck.core.grammar import Grammar
from potluck.gateway.preparing import prepare
from potluck.gateway.request import Conversation, InferenceRequest, Tool
from potluck.testing.memory_answering import MemoryAnswering
from potluck.text.grammar import GrammarCompiler, check_grammar
from potluck.text.tool_prompt import _decoded

MODEL = MemoryAnswering().model
COMPILER = GrammarCompiler(MODEL.tokenizer.spec, MODEL.tokenizer.vocabulary_size)
CLOSED = {"type": "object", "additionalProperties": False}
NUMBER, WORD = {"type": "integer"}, {"type": "string"}
WORD_BY_REFERENCE = CLOSED | {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": WORD}}
NUMBER_BY_REFERENCE = WORD_BY_REFERENCE | {"$defs": {"A": NUMBER}}
LIST = CLOSED | {"properties": {"a": NUMBER, "next": {"$ref": "#/definitions/List"}}, "required": ["a"]}
DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 7))


def grammar_of(*parameters: dict[str, Any]) -> Grammar:
    tools = tuple(Tool(f"tool{number}", "", schema) for number, schema in enumerate(parameters))
    conversation = Conversation(messages=({"role": "user", "content": "Hello"},), tools=tools, tool_choice="required")
    [choice] = prepare(MODEL, InferenceRequest(model=None, conversation=conversation), 16).choices
    assert choice.request.grammar is not None
    return choice.request.grammar


def allows(grammar: Grammar, value: object) -> bool:
    matcher = COMPILER.matcher(grammar)
    try:
        matcher.advance_to(MODEL.tokenizer.encode(json.dumps(value), parse_special=False, add_special=False))
    except BadGrammar:
        return False
    return bool(matcher.allowed()[list(MODEL.tokenizer.eos_ids)].all())


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (NUMBER_BY_REFERENCE, {"a": 1}, {"a": "b"}),
        (NUMBER_BY_REFERENCE | {"$id": "https://a.example/b"}, {"a": 1}, {"a": "b"}),
        (LIST | {"definitions": {"List": LIST}}, {"a": 1, "next": {"a": 2}}, {"a": 1, "next": {"a": "b"}}),
        ({"$ref": "#/definitions/List", "definitions": {"List": LIST}, "$schema": DRAFT_7}, {"a": 1, "next": {"a": 2}}, {"a": "b"}),
        (LIST | {"definitions": {"List": LIST}, "$schema": DRAFT_4}, {"a": 1, "next": {"a": 2}}, {"a": "b"}),
        (CLOSED | {"properties": {"a": {"$ref": "#"}}}, {"a": {"a": {}}}, {"a": {"a": 1}}),
        (CLOSED | {"properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}}, {"a": 1, "b": 2}, {"a": 1, "b": "c"}),
        (CLOSED | {"properties": {"$ref": NUMBER, "a": {"const": {"$ref": "#/b"}}}}, {"$ref": 1, "a": {"$ref": "#/b"}}, {"$ref": "b"}),
        (NUMBER_BY_REFERENCE | {"properties": {"a": {"$ref": "#c"}}, "$defs": {"A": NUMBER | {"$anchor": "c"}}}, {"a": 1}, {"a": "b"}),
    ],
)  # fmt: skip
def test_references_in_the_schemas_of_several_tools_mean_what_they_mean_in_one(
    parameters: dict[str, Any], right: object, wrong: object
) -> None:
    alone = grammar_of(parameters)
    assert (allows(alone, right), allows(alone, wrong)) == (True, False)
    for place, schemas in enumerate([(parameters, WORD_BY_REFERENCE), (WORD_BY_REFERENCE, parameters)]):
        several = grammar_of(*schemas)
        check_grammar(several)
        assert allows(several, {"name": f"tool{place}", "arguments": right})
        assert not allows(several, {"name": f"tool{place}", "arguments": wrong})


@pytest.mark.parametrize("extra", [{}, {"$id": "https://a.example/b"}])
def test_tools_whose_definitions_have_the_same_names_keep_their_own(extra: dict[str, Any]) -> None:
    grammar = grammar_of(NUMBER_BY_REFERENCE | extra, WORD_BY_REFERENCE | extra)
    found = [allows(grammar, {"name": f"tool{n}", "arguments": {"a": value}}) for n in (0, 1) for value in (1, "b")]
    assert found == [True, False, False, True]


@pytest.mark.parametrize(("begun", "continues"), [("", False), ("The capital is", True)])
def test_an_answer_that_was_begun_goes_on_with_its_first_space(begun: str, continues: bool) -> None:
    """SentencePiece puts one before a text, which is taken off again where an answer begins, and only there."""
    conversation = Conversation(messages=({"role": "user", "content": "Hello"},), begun_answer=begun)
    [choice] = prepare(MODEL, InferenceRequest(model=None, conversation=conversation), 16).choices
    assert choice.settings.continues_text is continues


def test_a_number_that_no_template_may_make_stays_text_in_a_call() -> None:
    """A model may write one; the conversation must go on all the same."""
    assert _decoded('{"a": 5}') == {"a": 5}
    large = '{"a": 123456789012345678901234567890}'
    assert _decoded(large) == large
