"""Finds tool calls in a model's text as it comes, in the three ways that models write them. Half a marker is never handed out.

`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen), an answer that is a JSON object with `name` and `parameters`
(Llama 3), `[TOOL_CALLS][{"name": …, "arguments": …}]` (Mistral). What turns out to be no call of a known tool is text after all,
every character of it; with a call go only its marks, the separators between calls and the blanks around them.
"""

import enum
import re
from collections.abc import Collection

import msgspec

_HERMES, _HERMES_END, _MISTRAL, _PYTHON_TAG = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_MARKERS = (_HERMES, _MISTRAL, _PYTHON_TAG)
# Tokens that are marks for the model rather than text, and that a reader of calls must see all the same.
MARKER_TOKENS = frozenset({_HERMES, _HERMES_END, _MISTRAL, _PYTHON_TAG})
MAX_CALL_LENGTH = 1 << 20
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.\-]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BLANKS = " \t\r\n"
_BETWEEN_CALLS = _BLANKS + ",;[]"


class CallStarted(msgspec.Struct, frozen=True):
    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of the arguments."""

    index: int
    text: str


Piece = str | CallStarted | CallArguments


class _State(enum.Enum):
    """START: nothing but white space yet; MARKED: after a marker; OBJECT: inside an object; CALLED: after that of a call."""

    START = "start"
    TEXT = "text"
    MARKED = "marked"
    OBJECT = "object"
    CALLED = "called"


class ToolCallParser:
    """`push` text, get pieces: text that is safe to show, and calls. `finish` gives what was held back."""

    def __init__(self, names: Collection[str]) -> None:
        self.call_count = 0
        self.unfinished_call: int | None = None  # known after `finish`: the first whose arguments came to no end
        self._names = frozenset(names)
        self._state = _State.START
        self._pending = ""
        self._marker = self._skipped = ""  # passed since the last text or call: text as well, unless a call follows
        self._is_hermes = False
        self._is_list = False  # a bracket is open around the calls
        self._object: _ObjectReader | None = None
        self._is_after_call = False  # line breaks between calls are not text

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """No more text comes: what was held back for a call that has not been told is text after all."""
        pieces: list[Piece] = []
        if self._object is None:
            is_half_closed = self._state is _State.CALLED and self._is_hermes
            _append_text(pieces, "" if is_half_closed else self._marker + self._skipped + self._pending)
        elif self._object.is_told:
            self._note_unfinished(self._object)
        else:
            _append_text(pieces, self._marker + self._skipped + self._object.raw)
        self._pending = self._marker = self._skipped = ""
        self._object, self._state = None, _State.TEXT
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """One transition; false when more text is needed."""
        if self._state is _State.OBJECT:
            return self._read_object(pieces)
        if self._state is _State.MARKED:
            return self._after_marker(pieces)
        if self._state is _State.CALLED:
            return self._after_call()
        return self._look_for_calls(pieces)

    def _look_for_calls(self, pieces: list[Piece]) -> bool:
        if self._is_after_call:
            self._pending = self._pending.lstrip("\n")
            self._is_after_call = not self._pending
        if self._state is _State.START:
            stripped = self._pending.lstrip()
            if not stripped:
                return False
            if stripped[0] == "{":
                self._skipped = self._pending[: len(self._pending) - len(stripped)]
                self._pending = stripped
                return self._open_object()
            if not _begins_marker(stripped):
                self._state = _State.TEXT
        at, marker = _first_marker(self._pending)
        if marker is not None:
            _append_text(pieces, self._pending[:at])
            self._pending, self._marker, self._state = self._pending[at + len(marker) :], marker, _State.MARKED
            self._is_hermes = marker == _HERMES
            return True
        if self._state is _State.TEXT:
            kept = _half_marker_length(self._pending)
            _append_text(pieces, self._pending[: len(self._pending) - kept])
            self._pending = self._pending[len(self._pending) - kept :]
        return False

    def _after_marker(self, pieces: list[Piece]) -> bool:
        """An object may be a call; if anything else comes, the marker was text."""
        self._skip_separators()
        if not self._pending:
            return False
        if self._pending[0] == "{":
            self._is_list = "[" in self._skipped
            return self._open_object()
        _append_text(pieces, self._marker)
        self._marker = ""
        return self._return_to_text()

    def _after_call(self) -> bool:
        """Drops what closes the calls; an object may be a further call, anything else is text again."""
        if not self._skipped:
            self._pending = self._pending.lstrip(_BLANKS)
            if self._is_list and self._pending.startswith("]"):
                self._pending, self._is_list = self._pending[1:].lstrip(_BLANKS), False
        self._skip_separators()
        if not self._pending:
            return False
        if self._pending[0] == "{":
            return self._open_object()
        if not self._skipped and self._pending.startswith(_HERMES_END):
            self._pending, self._state = self._pending[len(_HERMES_END) :], _State.TEXT
            self._is_after_call = True
            return True
        if not self._skipped and _HERMES_END.startswith(self._pending):
            return False
        return self._return_to_text()

    def _skip_separators(self) -> None:
        rest = self._pending.lstrip(_BLANKS if self._is_hermes else _BETWEEN_CALLS)
        self._skipped += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest

    def _return_to_text(self) -> bool:
        """What was skipped is looked at again: a bracket in it may begin a marker."""
        self._pending, self._skipped, self._state = self._skipped + self._pending, "", _State.TEXT
        return True

    def _open_object(self) -> bool:
        self._object, self._state = _ObjectReader(self._names, self.call_count), _State.OBJECT
        return True

    def _read_object(self, pieces: list[Piece]) -> bool:
        reader = self._object
        assert reader is not None
        self._pending = reader.push(self._pending, pieces)
        if not reader.is_complete:
            return False
        if reader.is_told:
            self._note_unfinished(reader)
            self.call_count += 1
            self._state = _State.CALLED
        else:
            _append_text(pieces, self._marker + self._skipped + reader.raw)
            self._state = _State.TEXT
        self._marker, self._skipped, self._object = "", "", None
        return True

    def _note_unfinished(self, reader: "_ObjectReader") -> None:
        if self.unfinished_call is None and not reader.has_all_arguments:
            self.unfinished_call = self.call_count


class _ObjectReader:
    """One JSON object. The call is told as soon as its name is known, its arguments as they come."""

    def __init__(self, names: frozenset[str], index: int) -> None:
        self.raw = ""
        self.is_told = self.is_complete = False
        self._names, self._index = names, index
        self._outer = _Balance()
        self._arguments: _Balance | None = None
        self._sought = False

    @property
    def has_all_arguments(self) -> bool:
        """Of an object that was told: at once, or as far as they have come."""
        return self._arguments is None or self._arguments.is_closed

    def push(self, text: str, pieces: list[Piece]) -> str:
        """Takes what belongs to the object; returns the rest."""
        fitting = text[: MAX_CALL_LENGTH - len(self.raw)]
        end = self._outer.advance(fitting)
        taken = fitting if end is None else fitting[:end]
        fresh = len(self.raw)
        self.raw += taken
        if self._arguments is None and not self._sought:
            fresh = self._look_for_name(pieces)
        if self._arguments is not None:
            self._tell_arguments(self.raw[fresh:], pieces)
        if end is None and len(self.raw) < MAX_CALL_LENGTH:
            return ""
        self.is_complete = True
        if not self.is_told:
            self._tell_whole(pieces)
        return text[len(taken) :]

    def _look_for_name(self, pieces: list[Piece]) -> int:
        match = _HEAD.match(self.raw)
        if match is None:
            return len(self.raw)
        self._sought = True
        if match.group(1) not in self._names:
            return len(self.raw)
        self.is_told, self._arguments = True, _Balance()
        pieces.append(CallStarted(self._index, match.group(1)))
        return match.end()

    def _tell_arguments(self, text: str, pieces: list[Piece]) -> None:
        assert self._arguments is not None
        if self._arguments.is_closed:
            return
        end = self._arguments.advance(text)
        told = text if end is None else text[:end]
        if told:
            pieces.append(CallArguments(self._index, told))

    def _tell_whole(self, pieces: list[Piece]) -> None:
        """An object whose name does not come first."""
        try:
            value = msgspec.json.decode(self.raw)
        except (msgspec.DecodeError, RecursionError):
            return
        found = as_call(value, self._names)
        if found is not None:
            self.is_told = True
            pieces += [CallStarted(self._index, found[0]), CallArguments(self._index, found[1])]


class _Balance:
    """Follows braces, brackets and strings of one JSON value."""

    def __init__(self) -> None:
        self.is_closed = False
        self._depth = 0
        self._is_text = self._is_escaped = False

    def advance(self, text: str) -> int | None:
        """Where the value ends in `text`; None: not yet."""
        for at, character in enumerate(text):
            if self._is_text:
                self._advance_in_text(character)
            elif character == '"':
                self._is_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return at + 1
        return None

    def _advance_in_text(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_text = False


def as_call(value: object, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of an object that is a call of a known tool."""
    if not isinstance(value, dict):
        return None
    nested = value.get("function")
    value = nested if isinstance(nested, dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict | str):
        return None
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return name, text


def _append_text(pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(text)


def _first_marker(text: str) -> tuple[int, str | None]:
    found = [(at, marker) for marker in _MARKERS if (at := text.find(marker)) >= 0]
    return min(found) if found else (-1, None)


def _begins_marker(text: str) -> bool:
    return any(text.startswith(marker) or marker.startswith(text) for marker in _MARKERS)


def _half_marker_length(text: str) -> int:
    """How many characters at the end may be the beginning of a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in _MARKERS):
            return length
    return 0
