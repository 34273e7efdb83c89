"""Token ids of answers whose head may be gone, for whoever takes them up again. Pure bookkeeping: bounded, and short-lived.

Found by the hash of a secret that the answer's reader has; who asks another node proves that it knows it.
Knows no text, no prompt's owner, and never reaches a disk or a log.
"""

import hashlib
import hmac
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SECRET_BYTES = 16
PROOF_BYTES = 32
LIFETIME_S = 60.0
_MOST = 256
_MOST_BYTES = 8 << 20
_TOKEN_BYTES = 4


def resume_key(secret: bytes) -> bytes:
    """What a shard is told to remember an answer by."""
    return hashlib.sha256(b"potluck resume " + secret).digest()


def answer_proof(key: bytes, asker: bytes, holder: bytes) -> bytes:
    """Shows `holder` that `asker` knows the key. To anybody else it is worth nothing, nor to a holder who does not know it."""
    return hmac.digest(key, b"potluck answer " + asker + holder, hashlib.sha256)


def key_behind(proof: bytes, keys: Iterable[bytes], asker: bytes, holder: bytes) -> bytes | None:
    """The one of `keys` that was proven. Tries all: there are some hundreds at most, at three microseconds each."""
    return next((key for key in keys if hmac.compare_digest(proof, answer_proof(key, asker, holder))), None)


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


class Accounts(NamedTuple):
    """What there is of one answer: this node's own memory, and what others say, who may be wrong about it or lie."""

    own: AnswerSoFar | None = None
    told: tuple[AnswerSoFar, ...] = ()


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

    def keys(self, now_s: float) -> list[bytes]:
        self.forget_old(now_s)
        return list(self._entries)

    def forget_old(self, now_s: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.since_s < self._lifetime_s:
                return
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        self._used_bytes -= 0 if entry is None else len(entry.data)
