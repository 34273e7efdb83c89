"""Token ids of answers whose head may be gone, for whoever takes them up again. Pure bookkeeping: bounded, and short-lived.

Found by the hash of a secret that the answer's reader has. Knows no text, no prompt's owner, and never reaches a disk or a log.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

SECRET_BYTES = 16
LIFETIME_S = 60.0
_MOST = 256
_MOST_BYTES = 8 << 20
_TOKEN_BYTES = 4


def resume_key(secret: bytes) -> bytes:
    """What a shard is told to remember an answer by: it can recognise the secret, and not make it up."""
    return hashlib.sha256(b"potluck resume " + secret).digest()


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """As they travel: little-endian int32."""
    numbers = array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked_tokens(data: bytes) -> tuple[int, ...]:
    numbers = array("i", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


class AnswerSoFar(NamedTuple):
    """The prompt's tokens and all that were chosen after them."""

    prompt_length: int
    tokens: tuple[int, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_length]

    @property
    def chosen(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]


class _Entry(NamedTuple):
    prompt_length: int
    data: bytes
    since_s: float


class RememberedAnswers:
    """By key, oldest first; what is one too many, too large or too old goes."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES, lifetime_s: float = LIFETIME_S) -> None:
        self._most, self._most_bytes, self._lifetime_s = most, most_bytes, lifetime_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._used_bytes = 0

    def __repr__(self) -> str:
        return f"<RememberedAnswers {len(self._entries)} of {self._most}, {self._used_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def put(self, key: bytes, answer: AnswerSoFar, now_s: float) -> None:
        """Of two accounts of one answer the longer one stays."""
        self.forget_old(now_s)
        known = self._entries.get(key)
        size_bytes = _TOKEN_BYTES * len(answer.tokens)
        if size_bytes > self._most_bytes or (known is not None and len(known.data) > size_bytes):
            return
        self._remove(key)
        self._entries[key] = _Entry(answer.prompt_length, packed_tokens(answer.tokens), now_s)
        self._used_bytes += size_bytes
        while len(self._entries) > self._most or self._used_bytes > self._most_bytes:
            self._remove(next(iter(self._entries)))

    def get(self, key: bytes, now_s: float) -> AnswerSoFar | None:
        self.forget_old(now_s)
        entry = self._entries.get(key)
        return None if entry is None else AnswerSoFar(entry.prompt_length, unpacked_tokens(entry.data))

    def forget_old(self, now_s: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.since_s < self._lifetime_s:
                return
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        self._used_bytes -= 0 if entry is None else len(entry.data)
