"""Cuts text at the special tokens that stand in it, as llama.cpp does. Knows nothing of what happens to the rest."""

from potluck.core.tokenizer_spec import CONTROL, UNKNOWN, USER_DEFINED, TokenizerSpec

_WHITE_SPACE = " \t\n\v\f\r"  # what C's isspace knows: the reference strips no other


class SpecialTokens:
    """The tokens that are found as literal text before anything else is done to it.

    Longer tokens go first, over the whole text; among equals the lower id. Control and unknown tokens are found only
    with `parse_special`; user-defined ones always.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        found = [i for i, kind in enumerate(spec.kinds) if kind in (CONTROL, UNKNOWN, USER_DEFINED) and spec.tokens[i]]
        found.sort(key=lambda i: -len(spec.tokens[i].encode("utf-8")))
        self._ordered = [(i, spec.tokens[i], spec.kinds[i] == USER_DEFINED) for i in found]
        self._strips_left = frozenset(spec.strips_left)
        self._strips_right = frozenset(spec.strips_right)

    def partition(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Stretches of plain text, and the ids of the tokens between them, in order; nothing is empty."""
        taken = bytearray(len(text))  # 1 where a token stands or swallowed white space
        spans: list[tuple[int, int, int]] = []
        characters = set(text)
        for token_id, token, is_user_defined in self._ordered:
            if token[0] in characters and (parse_special or is_user_defined):
                spans.extend(self._take(text, taken, token_id, token))
        spans.sort()
        return _fragments(text, taken, spans)

    def _take(self, text: str, taken: bytearray, token_id: int, token: str) -> list[tuple[int, int, int]]:
        spans = []
        start = text.find(token)
        while start >= 0:
            end = start + len(token)
            if taken.find(1, start, end) >= 0:
                start = text.find(token, start + 1)
                continue
            spans.append((start, end, token_id))
            first = _strip_left(text, taken, start) if token_id in self._strips_left else start
            last = _strip_right(text, taken, end) if token_id in self._strips_right else end
            taken[first:last] = b"\1" * (last - first)
            start = text.find(token, last)
        return spans


def _strip_left(text: str, taken: bytearray, start: int) -> int:
    while start > 0 and not taken[start - 1] and text[start - 1] in _WHITE_SPACE:
        start -= 1
    return start


def _strip_right(text: str, taken: bytearray, end: int) -> int:
    while end < len(text) and not taken[end] and text[end] in _WHITE_SPACE:
        end += 1
    return end


def _fragments(text: str, taken: bytearray, spans: list[tuple[int, int, int]]) -> list[str | int]:
    fragments: list[str | int] = []
    position = 0
    for start, end, token_id in [*spans, (len(text), len(text), -1)]:
        while position < start:
            free = taken.find(0, position, start)
            if free < 0:
                break
            stop = taken.find(1, free, start)
            position = start if stop < 0 else stop
            fragments.append(text[free:position])
        if token_id >= 0:
            fragments.append(token_id)
        position = end
    return fragments
