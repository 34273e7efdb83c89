"""What llama.cpp knows about vocabularies that the files do not say: pre-tokenizers, and tokens known by their text.

Shared by the readers of both formats; reads no file itself.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import regex

from potluck.core.errors import BadModelFile
from potluck.core.tokenizer_spec import BYTE, CONTROL, TokenizerSpec
from potluck.weights.source_tensor import shown

MAX_TOKENS = 1 << 21
MAX_MERGES = 1 << 22
MAX_TOKEN_LENGTH = 1 << 16
MAX_TEMPLATE_LENGTH = 1 << 17
_MAX_PATTERNS, _MAX_PATTERN_LENGTH = 64, 4096
_MAX_LEAST_COUNT = 1000  # what a pattern asks for at least so many times is compiled as often
_LEAST_COUNTS = regex.compile(r"\{(\d+)")
_RECURSION = regex.compile(r"\(\?(?:R|\d|&|P>|P&)")  # without end, it fills the memory before any time is over


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE
_QWEN2_PATTERN = _CONTRACTIONS + _WORD + r"|\p{N}" + _PUNCTUATION_AND_SPACE
# llama.cpp cannot tell cases of letters beyond ASCII; there, a letter counts as both.
_TEKKEN_UPPER, _TEKKEN_LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"))
_LLAMA3 = PreTokenizer((_LLAMA3_PATTERN,), ignores_merges=True, adds_bos=True)

# By the name that GGUF files give it.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": PreTokenizer((GPT2_PATTERN,)),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smollm": PreTokenizer((r"\p{N}", GPT2_PATTERN)),
    "qwen2": PreTokenizer((_QWEN2_PATTERN,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2_PATTERN,)),
    "glm4": PreTokenizer((_LLAMA3_PATTERN,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3_PATTERN,)),
    "tekken": PreTokenizer((_TEKKEN_PATTERN,), ignores_merges=True, adds_bos=True),
}

# Texts that end an answer whatever the file says. The last lines are padding, repository and file marks of code models.
_END_LIST = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
_FILL_LIST = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
_END_TEXTS = frozenset(_END_LIST.split())
_CONTROL_TEXTS = _END_TEXTS | frozenset(_FILL_LIST.split())  # control tokens, also where the file forgot to say so


def mark_control_tokens(tokens: Sequence[str], kinds: list[int]) -> None:
    """Makes control tokens of those whose text says that they are."""
    for token_id, token in enumerate(tokens):
        if token in _CONTROL_TEXTS:
            kinds[token_id] = CONTROL


def end_ids(tokens: Sequence[str], kinds: Sequence[int], named: Iterable[int | None]) -> tuple[int, ...]:
    """Every id that ends an answer: first those the file names, then the control tokens with a well-known text."""
    found = dict.fromkeys(token_id for token_id in named if token_id is not None)
    known = {t: i for i, t in enumerate(tokens) if t in _END_TEXTS and kinds[i] == CONTROL}
    # Two formats in which a text of the list is an ordinary mark.
    if (
        "<|end|>" in known
        and ("<|call|>" in known or "<|calls|>" in known)
        and (known.keys() & {"<|return|>", "<|flush|>"})
    ):
        del known["<|end|>"]
    if "<|tool_response>" in known:
        known.pop("</s>", None)
    found.update(dict.fromkeys(sorted(known.values())))
    return tuple(found)


def check_spec(spec: TokenizerSpec, file: Path | str) -> TokenizerSpec:
    """What holds for every vocabulary, whichever file or peer it came from; raises BadModelFile."""
    if not 0 < len(spec.tokens) <= MAX_TOKENS:
        raise BadModelFile(file, "tokens", f"{len(spec.tokens)} tokens; between 1 and {MAX_TOKENS} are possible")
    _check_shape(spec, file)
    # Where bytes of a token were no text the reader left U+FFFD, and such tokens may look alike.
    readable = [token for token in spec.tokens if "\ufffd" not in token]
    if len(set(readable)) != len(readable):
        raise BadModelFile(file, "tokens", "a token stands there twice")
    if max(map(len, spec.tokens)) > MAX_TOKEN_LENGTH:
        raise BadModelFile(file, "tokens", f"a token is longer than {MAX_TOKEN_LENGTH} characters")
    _check_unicode("tokens", spec.tokens, file)
    _check_unicode("merges", spec.merges, file)
    for token_id, (token, kind) in enumerate(zip(spec.tokens, spec.kinds, strict=True)):
        if kind == BYTE and _byte_of(token) is None:
            raise BadModelFile(file, "tokens", f"byte token {token_id} is not written like <0x0A>")
    if spec.adds_bos and spec.bos_id is None:
        raise BadModelFile(file, "bos_token_id", "is missing, although the model wants it before every text")
    if spec.chat_template is not None and len(spec.chat_template) > MAX_TEMPLATE_LENGTH:
        raise BadModelFile(file, "chat_template", f"is longer than {MAX_TEMPLATE_LENGTH} characters")
    if len(spec.split_patterns) > _MAX_PATTERNS:
        raise BadModelFile(
            file, "split_patterns", f"{len(spec.split_patterns)} patterns; at most {_MAX_PATTERNS} are possible"
        )
    for pattern in spec.split_patterns:
        compiled_pattern(pattern, file)
    return spec


def _check_shape(spec: TokenizerSpec, file: Path | str) -> None:
    """Every token has its kind and, where there are any, its score; every id is a token's."""
    count = len(spec.tokens)
    if len(spec.kinds) != count:
        raise BadModelFile(file, "token kinds", f"{len(spec.kinds)} for {count} tokens")
    needs_scores = spec.algorithm == "sentencepiece" and not spec.merges
    if len(spec.scores) != count and (spec.scores or needs_scores):
        raise BadModelFile(file, "scores", f"{len(spec.scores)} for {count} tokens")
    if len(spec.merges) > MAX_MERGES:
        raise BadModelFile(file, "merges", f"more than {MAX_MERGES} merges")
    named = (spec.bos_id, spec.unknown_id, *spec.eos_ids, *spec.strips_left, *spec.strips_right)
    for token_id in named:
        if token_id is not None and not 0 <= token_id < count:
            raise BadModelFile(file, "special tokens", f"{token_id} is not between 0 and {count - 1}")


def compiled_pattern(pattern: str, file: Path | str, field: str = "split_patterns") -> "regex.Pattern[str]":
    """A pattern by which text is split, from a file or a peer: refused before the compiler takes gigabytes for it."""
    if len(pattern) > _MAX_PATTERN_LENGTH or _least_count(pattern) > _MAX_LEAST_COUNT or _RECURSION.search(pattern):
        raise BadModelFile(file, field, f"{shown(pattern)} is too long, repeats too much, or calls itself")
    try:
        return regex.compile(pattern)
    except (regex.error, ValueError, RecursionError, OverflowError) as error:
        problem = f"{shown(pattern)} cannot be compiled: {shown(str(error))}"
        raise BadModelFile(file, field, problem) from None


def is_byte_token(token: str) -> bool:
    return _byte_of(token) is not None


def _byte_of(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    digits = token[3:5]
    return int(digits, 16) if all(digit in "0123456789ABCDEFabcdef" for digit in digits) else None


def _least_count(pattern: str) -> int:
    """How often the innermost part is asked for at least, were all counts around it."""
    counts = _LEAST_COUNTS.findall("".join(pattern.split()))  # white space may not count
    return math.prod(int(count.lstrip("0")[:9] or 1) for count in counts)


def _check_unicode(field: str, texts: Sequence[str], file: Path | str) -> None:
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadModelFile(file, field, "has text that is not valid Unicode") from None
