"""Text to token ids and back, for byte-level BPE and SentencePiece vocabularies, with the ids that llama.cpp gives.

Knows no file format (a TokenizerSpec has everything) and no chat template.
"""

import time
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property

import regex

from potluck.core.errors import BadModelFile, BadRequest
from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, TokenizerSpec
from potluck.text.byte_characters import bytes_to_characters, characters_to_bytes
from potluck.text.pair_merging import merge_pairs
from potluck.text.special_tokens import SpecialTokens
from potluck.weights.tokenizer_rules import compiled_pattern

_SPACE = "\u2581"
_CACHED_WORDS = 32_768
_CACHED_WORD_LENGTH = 64  # longer ones hardly come again
SPLIT_LIMIT_S = 10.0  # patterns come from model files, and a hostile one could take for ever


class Tokenizer:
    """One vocabulary. Immutable but for a cache of words; safe to share between threads."""

    def __init__(self, spec: TokenizerSpec, *, split_limit_s: float = SPLIT_LIMIT_S) -> None:
        self.spec = spec
        self._special = SpecialTokens(spec)
        splitter = _Splitter(spec.split_patterns, split_limit_s)
        self._words: _ByteBpe | _SentencePiece = (
            _ByteBpe(spec, splitter) if spec.algorithm == "byte_bpe" else _SentencePiece(spec, splitter)
        )
        self._eos_ids = frozenset(spec.eos_ids)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.spec.algorithm}, {self.vocabulary_size} tokens>"

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def vocabulary_size(self) -> int:
        return len(self.spec.tokens)

    @cached_property
    def longest_token(self) -> int:
        """In characters as the vocabulary writes them; no token stands for more of a text's."""
        return max(map(len, self.spec.tokens), default=1)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark for the model rather than text: control and unknown tokens."""
        return self._kind(token_id) in (CONTROL, UNKNOWN)

    def encode(self, text: str, *, parse_special: bool, add_special: bool = True) -> list[int]:
        """The ids of `text`. Untrusted text wants parse_special=False: it cannot then forge control tokens.

        `add_special` adds BOS and EOS where the model wants them, without looking whether `text` has them already.
        Raises BadRequest for text that is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text has half a surrogate pair at character {error.start}") from None
        ids = [self.spec.bos_id] if add_special and self.spec.adds_bos and self.spec.bos_id is not None else []
        for index, fragment in enumerate(self._special.partition(text, parse_special=parse_special)):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids.extend(self._words.encode(fragment, is_first=index == 0))
        if add_special and self.spec.adds_eos and self.spec.eos_ids:
            ids.append(self.spec.eos_ids[0])
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a rendered chat template, with BOS exactly once where the model wants it."""
        ids = self.encode(text, parse_special=True, add_special=False)
        bos_id = self.spec.bos_id
        if self.spec.adds_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def decode_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; often not whole characters."""
        kind = self._kind(token_id)
        token = self.spec.tokens[token_id]
        if kind == NORMAL:
            return self._words.token_bytes(token)
        if kind == BYTE:
            return bytes([int(token[3:5], 16)])
        if kind == UNUSED:
            return b""
        if kind == USER_DEFINED and self.spec.algorithm == "sentencepiece":
            token = token.replace(_SPACE, " ")
        return token.encode("utf-8")

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, continues_text: bool = False) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD.

        The space that SentencePiece puts before a text is taken off again, unless the text continues another.
        """
        data = b"".join(self.decode_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        if self.spec.adds_space_prefix and not continues_text:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def _kind(self, token_id: int) -> int:
        if not 0 <= token_id < len(self.spec.kinds):
            raise BadRequest(f"token id {token_id} is outside the vocabulary of {len(self.spec.kinds)}")
        return self.spec.kinds[token_id]


class _ByteBpe:
    """Words cut by patterns, written as GPT-2's byte characters, merged by the order of the merges."""

    def __init__(self, spec: TokenizerSpec, splitter: "_Splitter") -> None:
        self._spec = spec
        self._splitter = splitter
        self._ids = {token: i for i, token in enumerate(spec.tokens)}
        self._ranks: dict[str, int] = {}
        for rank, merge in enumerate(spec.merges):
            self._ranks.setdefault(merge, rank)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        if self._spec.normalization == "nfc":
            text = unicodedata.normalize("NFC", text)
        ids: list[int] = []
        for word in self._splitter.split(text):
            known = self._cache.get(word)
            ids.extend(self._encode_word(word) if known is None else known)
        return ids

    def token_bytes(self, token: str) -> bytes:
        return characters_to_bytes(token)

    def _encode_word(self, word: str) -> list[int]:
        characters = bytes_to_characters(word.encode("utf-8"))
        if self._spec.ignores_merges and characters in self._ids:
            ids = [self._ids[characters]]
        else:
            ids = []
            for symbol in merge_pairs(list(characters), self._rank):
                ids.extend(self._symbol_ids(symbol))
        _remember(self._cache, word, ids)
        return ids

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")

    def _symbol_ids(self, symbol: str) -> list[int]:
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        # A merge that makes no token, or a byte that the vocabulary lacks: dropped where it has no id, as in llama.cpp.
        return [self._ids[character] for character in symbol if character in self._ids]


class _SentencePiece:
    """Spaces as U+2581; pairs merged by the merges' order or the tokens' scores; the rest as byte tokens."""

    def __init__(self, spec: TokenizerSpec, splitter: "_Splitter") -> None:
        self._spec = spec
        self._splitter = splitter
        self._ids = {token: i for i, token in enumerate(spec.tokens)}
        self._ranks: dict[str, int] = {}
        for rank, merge in enumerate(spec.merges):
            self._ranks.setdefault(merge, rank)
        self._byte_ids = [self._byte_id(byte) for byte in range(256)]
        self._boundary = _independent_boundary(spec)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        if self._spec.normalization == "nfc":
            text = unicodedata.normalize("NFC", text)
        text = self._prefixed(text, is_first).replace(" ", _SPACE)
        ids: list[int] = []
        for stretch in self._splitter.split(text):
            for word in self._independent_words(stretch):
                known = self._cache.get(word)
                ids.extend(self._encode_word(word) if known is None else known)
        return ids

    def token_bytes(self, token: str) -> bytes:
        return token.replace(_SPACE, " ").encode("utf-8")

    def _prefixed(self, text: str, is_first: bool) -> str:
        spec = self._spec
        if not spec.adds_space_prefix or (spec.prefixes_first_only and not is_first):
            return text
        if spec.prefixes_unless_spaced and text.startswith((" ", _SPACE)):
            return text
        return " " + text

    def _independent_words(self, text: str) -> Iterator[str]:
        start = 0
        for match in self._boundary.finditer(text):
            yield text[start : match.start()]
            start = match.start()
        yield text[start:]

    def _encode_word(self, word: str) -> list[int]:
        priority = self._rank if self._ranks else self._negative_score
        ids: list[int] = []
        for symbol in merge_pairs(list(word), priority):
            token_id = self._ids.get(symbol)
            ids.extend(self._fallback(symbol) if token_id is None else [token_id])
        _remember(self._cache, word, ids)
        return ids

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")

    def _negative_score(self, left: str, right: str) -> float | None:
        token_id = self._ids.get(left + right)
        return None if token_id is None else -self._spec.scores[token_id]

    def _fallback(self, symbol: str) -> list[int]:
        byte_ids = [self._byte_ids[byte] for byte in symbol.encode("utf-8")]
        known = [token_id for token_id in byte_ids if token_id is not None]
        if len(known) == len(byte_ids):
            return known
        return known if self._spec.unknown_id is None else [self._spec.unknown_id]

    def _byte_id(self, byte: int) -> int | None:
        token_id = self._ids.get(f"<0x{byte:02X}>")
        return self._ids.get(chr(byte)) if token_id is None and byte < 128 else token_id


def _independent_boundary(spec: TokenizerSpec) -> regex.Pattern[str]:
    """Where text can be cut before U+2581 without changing a merge: where no token has that character before it inside.

    Whole prompts are one "word" to SentencePiece; cut so, they become words that a cache can know.
    """
    joined = [merge.replace(" ", "") for merge in spec.merges] or spec.tokens
    before: set[str] = set()
    for token in joined:
        if _SPACE in token[1:]:
            before.update(token[i - 1] for i in range(1, len(token)) if token[i] == _SPACE)
    letters = "".join(map(regex.escape, sorted(before | {_SPACE})))
    return regex.compile(f"(?<=[^{letters}])(?={_SPACE})")


class _Splitter:
    """Cuts text by each pattern in turn; what lies between matches is a piece of its own."""

    def __init__(self, patterns: Iterable[str], limit_s: float) -> None:
        self._limit_s = limit_s
        self._patterns = [compiled_pattern(pattern, "tokenizer") for pattern in patterns]

    def split(self, text: str) -> list[str]:
        pieces = [text]
        end_s = time.monotonic() + self._limit_s
        try:
            for pattern in self._patterns:
                pieces = [part for piece in pieces for part in _split_once(piece, pattern, end_s)]
        except TimeoutError as error:
            raise BadModelFile("tokenizer", "split_patterns", "take too long on this text") from error
        return pieces


def _split_once(text: str, pattern: regex.Pattern[str], end_s: float) -> list[str]:
    parts = []
    position = 0
    for match in pattern.finditer(text, timeout=max(end_s - time.monotonic(), 0.0)):
        start, end = match.span()
        if start > position:
            parts.append(text[position:start])
        if end > start:
            parts.append(text[start:end])
        position = end
    if position < len(text):
        parts.append(text[position:])
    return parts


def _remember(cache: dict[str, list[int]], word: str, ids: list[int]) -> None:
    if len(word) > _CACHED_WORD_LENGTH:
        return
    if len(cache) >= _CACHED_WORDS:
        cache.clear()  # simpler than ageing, and a new prompt refills it in milliseconds
    cache[word] = ids
