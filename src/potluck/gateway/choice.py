"""One choice of an answer, from tokens to events: text, stop strings, tool calls, logprobs. Decides only; no I/O.

Whatever was handed out is final: half characters, beginnings of stop strings and of tool-call markers are held back.
"""

import secrets
import string
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from potluck.gateway.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    ShownToken,
    TextDelta,
    TokenLogprobs,
    ToolCallArguments,
    ToolCallStarted,
)
from potluck.orchestrator.frames import TokenDelta
from potluck.text.detokenizer import StopMatcher, StreamingDetokenizer
from potluck.text.tokenizer import Tokenizer
from potluck.text.tool_calls import MARKER_TOKENS, CallArguments, CallStarted, Piece

_ID_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: templates of the Mistral family refuse any other."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


class CallReader(Protocol):
    """Text in; text and calls out. After `finish`: the first call whose arguments came to no end, if there is one."""

    unfinished_call: int | None

    def push(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


class NamedCallReader:
    """The whole answer is the arguments of one tool: a grammar has made sure of that."""

    def __init__(self, name: str) -> None:
        self.unfinished_call: int | None = None
        self._begun: list[Piece] = [CallStarted(0, name)]
        self._arguments: list[str] = []

    def push(self, text: str) -> list[Piece]:
        begun, self._begun = self._begun, []
        self._arguments.append(text)
        return [*begun, CallArguments(0, text)] if text else begun

    def finish(self) -> list[Piece]:
        try:
            msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            self.unfinished_call = 0
        return self.push("")


class ChoiceSettings(NamedTuple):
    stops: Sequence[str] = ()
    calls: CallReader | None = None
    wants_logprobs: bool = False
    continues_text: bool = False
    first_only: bool = False  # at most one tool call
    echoed_length: int = 0  # characters of the prompt that are shown before the answer


class ChoiceStream:
    """`push` each token, then `finish`; after `is_stopped` nothing more is wanted from below."""

    def __init__(
        self, choice: int, tokenizer: Tokenizer, settings: ChoiceSettings, call_id: Callable[[], str] = new_call_id
    ) -> None:
        self.choice, self.token_count, self.call_count = choice, 0, 0
        self.is_stopped = False
        self._tokenizer, self._settings, self._new_call_id = tokenizer, settings, call_id
        self._detokenizer = StreamingDetokenizer(tokenizer, continues_text=settings.continues_text)
        self._matcher = StopMatcher(settings.stops)
        self._stop: str | None = None
        # Characters of the choice's text that there are, and that were handed out.
        self._made = self._shown = settings.echoed_length
        self._waiting: deque[TokenLogprobs] = deque()  # of tokens whose text was not handed out yet

    @property
    def is_holding_logprobs(self) -> bool:
        return bool(self._waiting)

    def push(self, frame: TokenDelta) -> list[Event]:
        self.token_count += 1
        if self._settings.wants_logprobs and frame.token not in self._tokenizer.eos_ids:
            self._waiting.append(self._logprobs(frame))
        text = self._text_of(frame.token)
        self._made += len(text)
        check = self._matcher.push(text)
        if check.stop is not None:
            self._stop, self.is_stopped = check.stop, True
        return self._hand_out(check.text)

    def finish(self, reason: FinishReason) -> list[Event]:
        events: list[Event] = []
        if not self.is_stopped:
            rest = self._detokenizer.finish()
            self._made += len(rest)
            events += self._hand_out(self._matcher.push(rest).text + self._matcher.finish())
        if self._settings.calls is not None:
            events += self._events(self._settings.calls.finish(), ())
        events += self._last_logprobs()
        shown: FinishReason = "stop" if self.is_stopped else reason
        if shown == "stop" and self._has_calls_to_run():
            shown = "tool_calls"
        return [*events, ChoiceFinished(self.choice, shown, self._stop)]

    def _has_calls_to_run(self) -> bool:
        """Not where one of those shown was cut short, by a stop string inside it for instance: half a call must not be run."""
        cut_short = None if self._settings.calls is None else self._settings.calls.unfinished_call
        return self.call_count > 0 and (cut_short is None or cut_short >= self.call_count)

    def _text_of(self, token: int) -> str:
        if self._settings.calls is not None and self._tokenizer.is_special(token):
            marker = self._tokenizer.spec.tokens[token]
            return marker if marker in MARKER_TOKENS else ""
        return self._detokenizer.push(token)

    def _hand_out(self, text: str) -> list[Event]:
        self._shown += len(text)
        plain: list[Piece] = [text] if text else []
        pieces = plain if self._settings.calls is None else self._settings.calls.push(text)
        return self._events(pieces, self._due_logprobs() if pieces else ())

    def _events(self, pieces: Sequence[Piece], logprobs: tuple[TokenLogprobs, ...]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, str):
                events.append(TextDelta(self.choice, piece, logprobs))
                logprobs = ()
            elif not (self._settings.first_only and piece.index > 0):
                events.append(self._call_event(piece))
        return events if not logprobs else [*events, TextDelta(self.choice, "", logprobs)]

    def _call_event(self, piece: CallStarted | CallArguments) -> Event:
        if isinstance(piece, CallArguments):
            return ToolCallArguments(self.choice, piece.index, piece.text)
        self.call_count += 1
        return ToolCallStarted(self.choice, piece.index, self._new_call_id(), piece.name)

    def _due_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens whose text has begun to be handed out."""
        due = []
        while self._waiting and self._waiting[0].start < self._shown:
            due.append(self._waiting.popleft())
        return tuple(due)

    def _last_logprobs(self) -> list[Event]:
        """Of tokens that make no text; not of those that a stop string has cut off."""
        limit = self._shown if self.is_stopped else self._made + 1
        rest = tuple(told for told in self._waiting if told.start < limit)
        self._waiting.clear()
        return [TextDelta(self.choice, "", rest)] if rest else []

    def _logprobs(self, frame: TokenDelta) -> TokenLogprobs:
        """Of the token that is to come next."""
        chosen = shown_token(self._tokenizer, frame.token, frame.logprob or 0.0)
        start = self._made + self._detokenizer.characters_before(frame.token)
        top = tuple(shown_token(self._tokenizer, token, value) for token, value in frame.top)
        return TokenLogprobs(chosen, start, top)


def shown_token(tokenizer: Tokenizer, token: int, logprob: float) -> ShownToken:
    data = tokenizer.decode_bytes(token)
    return ShownToken(token, data.decode("utf-8", errors="replace"), data, logprob)
