"""What a grammar allows: a pure function of grammar and tokens, whatever way a matcher came there; and what is refused."""

import contextlib
import json
import random
import time

import msgspec
import numpy as np
import pytest

from potluck.core.errors import BadGrammar
from potluck.core.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNUSED, TokenizerSpec
from potluck.text.byte_characters import bytes_to_characters
from potluck.text.grammar import GrammarCompiler, check_grammar
from potluck.text.tokenizer import Tokenizer

WORDS = [
    b'{"',
    b'":',
    b' "',
    b'"}',
    b"true",
    b"false",
    b"name",
    b"age",
    b"12",
    b"Anna",
    b" and",
    b"Hello",
    "é".encode(),
]
BYTES = [bytes([byte]) for byte in range(256)]
EOS, START = 256 + len(WORDS), 257 + len(WORDS)
BPE = TokenizerSpec(
    algorithm="byte_bpe",
    tokens=(*(bytes_to_characters(data) for data in BYTES + WORDS), "</s>", "<s>", "<gone>"),
    kinds=(*[NORMAL] * (256 + len(WORDS)), CONTROL, CONTROL, UNUSED),
    split_patterns=(r"\w+|\W",),
    eos_ids=(EOS,),
)
PIECES = TokenizerSpec(
    algorithm="sentencepiece",
    tokens=(*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581and", "Hello", '{"', "true", "</s>"),
    kinds=(*[BYTE] * 256, *[NORMAL] * 5, CONTROL),
    scores=(*[0.0] * 256, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0),
    adds_space_prefix=True,
    eos_ids=(261,),
)
SPECS = {"bpe": BPE, "sentencepiece": PIECES}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}, "is": {"type": "boolean"}},
    "required": ["name", "age", "is"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_object"),
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("regex", "[a-z]{2,5}( [0-9]+){1,3}-forced text é"),
    Grammar("lark", 'start: "Hello " NAME tail\nNAME: /[A-Z][a-z]+/\ntail: " and" start | "!"'),
]


def compiler(name: str = "bpe", extra: int = 0) -> GrammarCompiler:
    spec = SPECS[name]
    return GrammarCompiler(spec, len(spec.tokens) + extra)


def walk(grammars: GrammarCompiler, grammar: Grammar, draw: random.Random, most: int, eos: int) -> list[int]:
    """Tokens drawn from what is allowed, to the end of the answer where there is one."""
    matcher, tokens = grammars.matcher(grammar), list[int]()
    while len(tokens) < most and tokens[-1:] != [eos]:
        tokens.append(int(draw.choice(np.flatnonzero(matcher.allowed()))))
        matcher.advance_to(tokens)
    return tokens


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("name", SPECS)
def test_what_is_allowed_depends_on_grammar_and_tokens_alone(name: str, grammar: Grammar) -> None:
    """Step by step, at one go, after steps back and astray: the same mask."""
    grammars, draw = compiler(name), random.Random(name + grammar.kind)
    eos = SPECS[name].eos_ids[0]
    for _ in range(6):
        tokens, other = (walk(grammars, grammar, draw, 25, eos) for _ in range(2))
        wandering = grammars.matcher(grammar, other)
        stepping = compiler(name).matcher(grammar)
        for length in sorted({*range(0, len(tokens), 5), len(tokens)}):
            expected = compiler(name).matcher(grammar, tokens[:length]).allowed()
            stepping.advance_to(tokens[:length])
            wandering.advance_to(tokens[:length])
            assert (stepping.allowed() == expected).all()
            assert (wandering.allowed() == expected).all()
            wandering.advance_to(other[: draw.randrange(len(other) + 1)])


def test_answers_end_as_their_schema_says() -> None:
    grammars, draw, found = compiler(), random.Random(3), 0
    for _ in range(40):
        tokens = walk(grammars, GRAMMARS[1], draw, 400, EOS)
        if tokens[-1] == EOS:
            found += 1
            answer = json.loads(Tokenizer(BPE).decode(tokens[:-1]))
            assert list(answer) == ["name", "age", "is"]
            assert isinstance(answer["age"], int)
            assert len(answer["name"]) <= 5
    assert found >= 5


def test_after_its_end_only_the_end_of_the_answer_may_follow() -> None:
    grammar = Grammar("regex", "true")
    matcher = compiler(extra=7).matcher(grammar, [256 + WORDS.index(b"true")])
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]
    matcher.advance_to([256 + WORDS.index(b"true"), EOS, EOS, 5])  # a head that does not want to end
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]
    matcher.advance_to([])
    assert EOS not in np.flatnonzero(matcher.allowed())


def test_marks_for_the_model_and_ids_past_the_vocabulary_are_never_allowed() -> None:
    allowed = compiler(extra=9).matcher(Grammar("regex", "(.|\n)*")).allowed()
    assert len(allowed) == len(BPE.tokens) + 9
    assert not allowed[START]
    assert not allowed[len(BPE.tokens) - 1 :].any()
    assert allowed[EOS]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "json_schema cannot be used"),
        (Grammar("json_schema", "[]"), "must be an object"),
        (Grammar("json_schema", '{"type":"strin"}'), "strin"),
        (Grammar("json_schema", '{"$ref":"http://example.com/schema"}'), "example.com"),
        (Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("lark", "start: " + "(" * 20000), "deeply nested"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_CHARACTERS + 1)), "characters"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_reason_by_head_and_shard(grammar: Grammar, words: str) -> None:
    with pytest.raises(BadGrammar, match=words):
        check_grammar(grammar)
    with pytest.raises(BadGrammar, match=words):
        compiler().matcher(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a{1,1000}){1000}"),
        Grammar("regex", "a{3}{3}{3}{3}{3}{3}{3}{3}{3}"),
        Grammar("regex", "(a|b)*a(a|b){60}"),
        Grammar("json_schema", json.dumps({"type": "string", "pattern": "^(a{0,3000}){0,3000}$"})),
        Grammar("json_schema", json.dumps({"enum": [f"value number {number}" for number in range(9_000)]})),
    ],
    ids=range(5),
)
def test_costly_grammars_are_done_with_in_bounded_time(grammar: Grammar) -> None:
    began = time.process_time()
    with contextlib.suppress(BadGrammar):
        walk(compiler(), grammar, random.Random(1), 10, EOS)
    assert time.process_time() - began < 5.0


def test_tokens_that_the_grammar_does_not_allow_are_refused() -> None:
    with pytest.raises(BadGrammar, match="cannot be followed"):
        compiler().matcher(Grammar("regex", "[0-9]+"), [ord("a")])


def test_a_model_without_an_end_cannot_be_held_to_a_grammar() -> None:
    with pytest.raises(BadGrammar, match="no token that ends"):
        GrammarCompiler(msgspec.structs.replace(BPE, eos_ids=()), len(BPE.tokens))


def test_few_compiled_grammars_are_kept() -> None:
    grammars = compiler()
    for number in range(30):
        grammars.matcher(Grammar("regex", f"a{{{number + 1}}}"))
    assert "8 compiled" in repr(grammars)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"name": "Anna", "age": 12, "is": true}', True),
        ('{"name":"Anna","age":12,"is":true}', True),
        ('{\n  "name": "Anna",\n  "age": 12,\n  "is": true\n}', True),
        ('{"name"\n\n', False),
        ('{"name":  ', False),
    ],
)
def test_blanks_between_values_are_few_so_that_no_answer_is_lost_in_them(text: str, is_allowed: bool) -> None:
    tokens = list(text.encode())  # the first 256 tokens are the bytes
    matcher = compiler().matcher(Grammar("json_schema", json.dumps(PERSON)))
    with contextlib.nullcontext() if is_allowed else pytest.raises(BadGrammar):
        matcher.advance_to(tokens)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ('{"oneOf": [{"type": "object"}, {"type": "object"}]}', "use anyOf"),
        ('{"$ref": "#"}', "nothing at all can be written"),
    ],
)
def test_complaints_that_only_the_library_understands_are_put_in_plain_words(schema: str, complaint: str) -> None:
    with pytest.raises(BadGrammar, match=complaint):
        compiler().matcher(Grammar("json_schema", schema))
