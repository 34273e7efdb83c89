"""Tokens to text as they come, and stop strings across tokens. What was handed out is never changed. Knows no model."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from potluck.core.errors import BadRequest
from potluck.text.tokenizer import Tokenizer

MAX_STOPS = 64
MAX_STOP_LENGTH = 4096


class StreamingDetokenizer:
    """Holds back the bytes of an unfinished character; invalid bytes become U+FFFD.

    All that `push` and `finish` return, joined, is what `Tokenizer.decode` makes of the same ids. `continues_text`: the
    answer goes on where the prompt ended (completions), so a leading space belongs to it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strips_space = tokenizer.spec.adds_space_prefix and not continues_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def characters_before(self, token_id: int) -> int:
        """How many U+FFFD the bytes held back become where that token is the next: none, if it goes on with their character."""
        held, data = self._decoder.getstate()[0], self._bytes_of(token_id)
        return len((held + data[:1]).decode("utf-8", errors="replace")) - 1 if data else 0

    def push(self, token_id: int) -> str:
        data = self._bytes_of(token_id)
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        return self._decoder.decode(data)

    def _bytes_of(self, token_id: int) -> bytes:
        is_hidden = self._skip_special and self._tokenizer.is_special(token_id)
        return b"" if is_hidden else self._tokenizer.decode_bytes(token_id)

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopCheck(NamedTuple):
    text: str  # safe to hand out
    stop: str | None  # the stop string that ended the answer


class StopMatcher:
    """Finds the first stop string to be complete, however the text is cut; it is not part of the output.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise BadRequest(f"{len(stops)} stop strings are too many; {MAX_STOPS} are allowed", "stop")
        if any(not stop or len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise BadRequest(f"a stop string must have between 1 and {MAX_STOP_LENGTH} characters", "stop")
        # Longest first: where two end at the same character, the one that began earlier wins.
        self._prefixes = [_Prefix(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._held = ""
        self._stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stop is not None

    def push(self, text: str) -> StopCheck:
        if self._stop is not None:
            return StopCheck("", self._stop)
        for index, character in enumerate(text):
            for prefix in self._prefixes:
                if prefix.advance(character):
                    return self._stopped(self._held + text[: index + 1], prefix.stop)
        pending = self._held + text
        kept = max((prefix.matched for prefix in self._prefixes), default=0)
        self._held = pending[len(pending) - kept :]
        return StopCheck(pending[: len(pending) - kept], None)

    def finish(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _stopped(self, pending: str, stop: str) -> StopCheck:
        self._held = ""
        self._stop = stop
        return StopCheck(pending[: len(pending) - len(stop)], stop)


class _Prefix:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallbacks = _fallbacks(stop)

    def advance(self, character: str) -> bool:
        """Takes one more character; true when the stop string is complete."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallbacks[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    fallbacks = [0]
    matched = 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = fallbacks[matched - 1]
        if stop[matched] == character:
            matched += 1
        fallbacks.append(matched)
    return fallbacks
