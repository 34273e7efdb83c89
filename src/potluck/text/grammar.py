"""Grammars over a vocabulary: whether one can be used, and which tokens it allows next. llguidance does the parsing.

What is allowed is a pure function of the grammar and the tokens generated so far; nothing else is remembered that could change it.
Work is bounded by the library's own counters (fuel, states, items), which a hostile grammar meets within a second or so, and by
`schema_limits.py` where it has none: not by a clock, because a busy machine must not refuse in the middle of an answer what another
has accepted.
"""

from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadGrammar
from potluck.core.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.text.schema_limits import check_schema
from potluck.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.bool_]
_MOST_COMPILED = 8
_LONGEST_COMPLAINT = 400
_CLEARER = {
    "oneOf constraints are not supported": "the cases of a oneOf overlap, so that it cannot be told which one is being written; use anyOf",
    "NoExtensionBias": "nothing at all can be written under it; does it refer only to itself?",
}
_BLANK = r"[ \t]|\r?\n[ \t]{0,64}"  # one space, or a new line with its indentation


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def check_grammar(grammar: Grammar) -> None:
    """For a head, before anything is sent: raises BadGrammar for what no shard could use. Knows no vocabulary.

    The sampling shard decides; it also refuses what is well-formed and too large to compute with.
    """
    complaint = llguidance.LLMatcher.validate_grammar(_source(grammar), limits=_limits())
    if complaint and not complaint.startswith("WARNING"):
        raise BadGrammar(_explained(grammar, complaint))


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own form."""
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise BadGrammar(f"a grammar may have {MAX_GRAMMAR_CHARACTERS} characters, not {len(grammar.text)}")
    matcher = llguidance.LLMatcher
    try:
        if grammar.kind == "regex":
            return matcher.grammar_from_regex(grammar.text)
        if grammar.kind == "lark":
            return matcher.grammar_from_lark(grammar.text)
        return matcher.grammar_from_json_schema(
            _tidy('{"type":"object"}' if grammar.kind == "json_object" else grammar.text)
        )
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise BadGrammar(_explained(grammar, str(error))) from None


def _tidy(schema: str) -> str:
    """The schema, with an end to blanks between its values: small models can write line breaks until their limit."""
    decoded = msgspec.json.decode(schema)
    check_schema(decoded)
    if not isinstance(decoded, dict):
        return schema
    return msgspec.json.encode({"x-guidance": {"whitespace_pattern": _BLANK}, **decoded}).decode()


def _explained(grammar: Grammar, complaint: str) -> str:
    return f"this {grammar.kind} cannot be used: {_plain(complaint)}"


def _plain(complaint: str) -> str:
    """The library's words, but for those that only its own programmers understand."""
    shown = complaint.removesuffix("<non-verbose/>").strip()
    return next((clear for start, clear in _CLEARER.items() if shown.startswith(start)), shown[:_LONGEST_COMPLAINT])


class _Vocabulary:
    """What the library asks of a tokenizer. Text inside a grammar is tokenized as it stands, without a space before it."""

    is_tokenizer_wrapper = True

    def __init__(self, spec: TokenizerSpec) -> None:
        tokenizer = Tokenizer(msgspec.structs.replace(spec, adds_space_prefix=False))
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = spec.eos_ids[0], spec.bos_id
        self.tokens = [tokenizer.decode_bytes(token) for token in range(len(spec.tokens))]
        self.special_token_ids = [token for token in range(len(spec.tokens)) if tokenizer.is_special(token)]

        self._by_bytes = {data: token for token, data in enumerate(self.tokens) if not tokenizer.is_special(token)}
        self._longest = max(map(len, self._by_bytes))

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(data.decode("utf-8", errors="replace"), parse_special=False, add_special=False)
        return ids if b"".join([self.tokens[token] for token in ids]) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token that fits, and so on: for half characters, and where a vocabulary writes spaces its own way."""
        ids, start = [], 0
        while start < len(data):
            stop = min(start + self._longest, len(data))
            while stop > start and data[start:stop] not in self._by_bytes:
                stop -= 1
            if stop == start:
                break  # a byte that this vocabulary cannot say; the mask will allow nothing
            ids.append(self._by_bytes[data[start:stop]])
            start = stop
        return ids


class GrammarCompiler:
    """Grammars over one vocabulary. A few compiled ones are kept: a new epoch asks for the same again."""

    def __init__(self, spec: TokenizerSpec, vocabulary_size: int) -> None:
        if not spec.eos_ids:
            raise BadGrammar("this model has no token that ends an answer, so none can be held to a grammar")
        self._size, self._eos = vocabulary_size, spec.eos_ids
        self._tokenizer = llguidance.LLTokenizer(_Vocabulary(spec), eos_token=list(spec.eos_ids))  # type: ignore[arg-type]
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def __repr__(self) -> str:
        return f"<GrammarCompiler {self._size} tokens, {len(self._compiled)} compiled>"

    def matcher(self, grammar: Grammar, generated: Sequence[int] = ()) -> "GrammarMatcher":
        """Ready for the token after `generated`. Raises BadGrammar where the grammar cannot be used, or does not allow those."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile(grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        matcher = GrammarMatcher(compiled.deep_copy(), self._tokenizer.vocab_size, self._size, self._eos)
        matcher.advance_to(generated)
        return matcher

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        compiled = llguidance.LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_limits())
        if compiled.is_error():
            raise BadGrammar(_explained(grammar, compiled.get_error()))
        # What cannot be computed with is found now, not at the first token.
        GrammarMatcher(compiled.deep_copy(), self._tokenizer.vocab_size, self._size, self._eos).allowed()
        return compiled


class GrammarMatcher:
    """One answer's way through a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, tokens: int, vocabulary_size: int, eos: Sequence[int]) -> None:
        self._matcher, self._tokens, self._size = matcher, tokens, vocabulary_size
        self._eos = [token for token in eos if token < vocabulary_size]
        self._generated: list[int] = []  # all that was said, …
        self._consumed = 0  # … of which the grammar has seen so many: after its end nothing matters any more
        self._bits = np.zeros(-(-tokens // 32), np.uint32)

    def __repr__(self) -> str:
        return f"<GrammarMatcher after {len(self._generated)} tokens{', complete' if self._is_complete else ''}>"

    @property
    def _is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def advance_to(self, generated: Sequence[int]) -> None:
        """To the place after `generated`, forwards or back. Raises BadGrammar for a token that was not allowed."""
        common = _common_length(self._generated, generated)
        if common < self._consumed:
            self._require(self._matcher.rollback(self._consumed - common))
            self._consumed = common
        del self._generated[common:]
        for token in generated[common:]:
            self._generated.append(token)
            if not self._is_complete:
                self._require(self._matcher.consume_token(token))
                self._consumed += 1

    def allowed(self) -> Mask:
        """Which tokens may come next; only those that end an answer, once the grammar is complete. Raises BadGrammar for none."""
        allowed = np.zeros(self._size, np.bool_)
        if not self._is_complete:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._require(not self._matcher.is_error())
            width = min(self._tokens, self._size)
            allowed[:width] = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:width].view(np.bool_)
        if self._is_complete:
            self._require(not self._matcher.is_error())
            allowed[:] = False
            allowed[self._eos] = True
        if not allowed.any():
            raise BadGrammar("the grammar allows nothing that this model's vocabulary can say")
        return allowed

    def _require(self, went_well: bool) -> None:
        if not went_well:
            raise BadGrammar(f"the grammar cannot be followed further: {_plain(self._matcher.get_error())}")


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Of what both begin with. Nearly always all of the shorter one, which is seen without a loop."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])
