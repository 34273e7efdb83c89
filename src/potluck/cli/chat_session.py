"""A conversation at the terminal without the terminal: messages, slash commands, lines that belong together. No I/O."""

from typing import Any, NamedTuple

import msgspec

HELP = """\
/help             this
/reset            forget the conversation, keep the system message
/system [TEXT]    set the system message (and begin anew); without TEXT: take it away
/model [NAME]     talk to another model; without NAME: list them
/save FILE        write the conversation as JSON
/exit             end (so does Ctrl-D)
\"\"\"               begins and ends a text of several lines; so does \\ at the end of a line
Ctrl-C            stops the answer, not the program"""

_FENCE = '"""'


class Say(NamedTuple):
    text: str


class Ask(NamedTuple):
    """The conversation has a question that wants an answer."""


class Save(NamedTuple):
    path: str


class ListModels(NamedTuple):
    pass


class Choose(NamedTuple):
    """Talk to that model from now on, where there is one of that name."""

    model: str


class End(NamedTuple):
    pass


Deed = Say | Ask | Save | ListModels | Choose | End


class AnswerFigures(msgspec.Struct, frozen=True):
    """How an answer came about. `seconds` is from the first to the last token."""

    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    seconds: float
    failovers: int
    pause_ms: float
    nodes: tuple[str, ...]
    is_stopped: bool = False
    exactness: str = "bitwise"

    @property
    def tokens_per_s(self) -> float:
        return (self.completion_tokens - 1) / self.seconds if self.completion_tokens > 1 and self.seconds > 0 else 0.0


class LineGatherer:
    """Puts lines together: between two fences, or where a line ends in a backslash. None: more is to come."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_fenced = False

    @property
    def is_open(self) -> bool:
        return self._is_fenced or bool(self._lines)

    def add(self, line: str) -> str | None:
        if self._is_fenced:
            return self._add_fenced(line)
        if not self._lines and line.lstrip().startswith(_FENCE):
            self._is_fenced = True
            return self._add_fenced(line.lstrip()[len(_FENCE) :])
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        return self._taken([*self._lines, line])

    def drop(self) -> None:
        self._lines, self._is_fenced = [], False

    def rest(self) -> str:
        """What was gathered so far, where no further line will come."""
        return self._taken(self._lines)

    def _add_fenced(self, line: str) -> str | None:
        if line.rstrip().endswith(_FENCE):
            return self._taken([*self._lines, line.rstrip()[: -len(_FENCE)]])
        self._lines.append(line)
        return None

    def _taken(self, lines: list[str]) -> str:
        self.drop()
        return "\n".join(lines).strip("\n")


class ChatSession:
    """`enter` says what to do with a text that was typed; `answered` takes what the model wrote."""

    def __init__(self, model: str | None = None, system: str | None = None) -> None:
        self.model, self.system = model, system
        self.turns: list[dict[str, str]] = []
        self.figures: list[AnswerFigures] = []

    def __repr__(self) -> str:
        return f"<ChatSession {self.model} {len(self.turns)} turns>"

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def enter(self, text: str) -> Deed | None:
        if text.startswith("/") and "\n" not in text:
            word, _, rest = text[1:].partition(" ")
            return self._command(word, rest.strip())
        if not text.strip():
            return None
        self.turns.append({"role": "user", "content": text})
        return Ask()

    def answered(self, text: str, figures: AnswerFigures) -> None:
        """Also of an answer that was stopped: the model should see what it said."""
        self.turns.append({"role": "assistant", "content": text})
        self.figures.append(figures)

    def unanswered(self) -> None:
        """The question failed: it is taken back, so that it can be asked again."""
        self.turns.pop()

    def saved(self) -> dict[str, Any]:
        return {"model": self.model, "messages": self.messages, "answers": self.figures}

    def _command(self, word: str, rest: str) -> Deed:
        match word:
            case "help" | "?":
                return Say(HELP)
            case "reset" | "clear":
                self.turns.clear()
                return Say("begun anew")
            case "system":
                self.system = rest or None
                self.turns.clear()
                return Say("system message set; begun anew" if rest else "no system message; begun anew")
            case "model":
                return Choose(rest) if rest else ListModels()
            case "save":
                return Save(rest) if rest else Say("say where to: /save FILE")
            case "exit" | "quit" | "bye":
                return End()
        return Say(f"there is no /{word}; /help lists the commands")
