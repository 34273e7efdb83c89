"""`potluck chat`: a conversation at the terminal, streamed through a node's API."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.chat_session import AnswerFigures, Ask, ChatSession, End, LineGatherer, ListModels, Save, Say
from potluck.cli.console import JsonOption, counted, harmless, notice, one_line, print_json
from potluck.cli.running import api_key, api_url, wait_until_answerable
from potluck.core.errors import BadRequest, PotluckError

if TYPE_CHECKING:
    from potluck.client import Client, Event

_HISTORY_LINES = 1000
_PROMPT, _MORE = ">>> ", "... "


class ChatFailed(PotluckError):
    """The API cannot be reached, or refuses."""

    code = "chat_failed"


def chat(
    model: Annotated[str | None, typer.Option("--model", "-m", help="One that is on offer; /model lists them.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="Another node's API, e.g. http://10.0.0.7:7470.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=2, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Of each answer.")] = 1024,
    history: Annotated[bool, typer.Option(help="Keep what you type, for the arrow keys, in a file of yours.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Talk to the swarm; /help lists what can be typed. Without a terminal: each line of the input is a question."""
    from potluck.client import Client

    address = base_url(url) if url is not None else api_url()
    if url is None:
        wait_until_answerable(model)
    with Client(address, None if url is not None else api_key()) as client:
        session = ChatSession(_chosen(client, model, address), system)
        talk = _Talk(client, session, {"temperature": temperature, "max_tokens": max_tokens}, as_json)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        if is_terminal:
            notice(f"{one_line(session.model or '')} at {address}; /help lists the commands, Ctrl-D ends")
        with _line_editing(history) if is_terminal else contextlib.nullcontext():
            talk.run(is_terminal)
    if as_json:
        print_json(session.saved())


def base_url(url: str) -> str:
    """As people type it: with or without http:// and /v1."""
    full = url if "://" in url else f"http://{url}"
    return full.rstrip("/").removesuffix("/v1")


def _chosen(client: "Client", model: str | None, address: str) -> str:
    names = _models(client, address)
    if model is not None and model not in names:
        raise BadRequest(f"{address} offers no {model}; there is {', '.join(names) or 'nothing yet'}")
    if not names:
        raise ChatFailed("no model can be asked yet; `potluck status` says what is missing")
    return model or names[0]


def _models(client: "Client", address: str) -> list[str]:
    import httpx

    from potluck.client import ApiError

    try:
        return client.models()
    except httpx.HTTPError as error:
        raise ChatFailed(f"nothing answers at {address} ({error}); is a node running there?") from None
    except ApiError as error:
        hint = "; set POTLUCK_API_KEY to that node's key" if error.status == 401 else ""
        raise ChatFailed(f"{error}{hint}") from None


class _Talk:
    """Reads, asks, prints. Ctrl-C while an answer comes ends that answer; while typing it drops the line."""

    def __init__(self, client: "Client", session: ChatSession, fields: dict[str, float], is_silent: bool) -> None:
        self._client, self._session, self._fields, self._is_silent = client, session, fields, is_silent
        self._lines = LineGatherer()

    def run(self, is_terminal: bool) -> None:
        while True:
            try:
                text = self._lines.add(input((_MORE if self._lines.is_open else _PROMPT) if is_terminal else ""))
            except EOFError:
                return print() if is_terminal else None
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                self._lines.drop()
                print("\n(Ctrl-D ends)")
                continue
            if text is not None and not self._do(text):
                return None

    def _do(self, text: str) -> bool:
        """Whether to go on."""
        match self._session.enter(text):
            case End():
                return False
            case Say(said):
                notice(said)
            case Save(path):
                self._save(path)
            case ListModels():
                notice("\n".join(_models(self._client, "that address")))
            case Ask():
                self._answer()
        return True

    def _save(self, path: str) -> None:
        import msgspec

        try:
            Path(path).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(self._session.saved())))
        except OSError as error:
            return notice(f"cannot be written: {error.strerror}")
        return notice(f"saved to {path}")

    def _answer(self) -> None:
        import httpx

        from potluck.client import ApiError

        stream = AnswerStream(self._is_silent)
        try:
            for event in self._client.chat(self._session.messages, model=self._session.model, **self._fields):
                stream.take(event, time.monotonic())
        except KeyboardInterrupt:
            stream.is_stopped = True
        except (ApiError, httpx.HTTPError) as error:
            self._session.unanswered()
            if self._is_silent:
                raise ChatFailed(str(error)) from None
            return notice(f"\nerror: {one_line(str(error))}; `potluck status` may say why")
        self._session.answered(stream.text, stream.figures())
        if not self._is_silent:
            print()
            notice(figures_line(stream.figures()))
        return None


class AnswerStream:
    """Prints an answer's text as it comes, and measures."""

    def __init__(self, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._began_s = time.monotonic()
        self._first_s = self._last_s = 0.0
        self._parts: list[str] = []
        self._counts: AnswerFigures | None = None
        self._failovers, self._pause_ms = 0, 0.0
        self.is_stopped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def take(self, event: "Event", now_s: float) -> None:
        from potluck.client import ShardFailover, Text, Usage

        if isinstance(event, Text):
            self._first_s = self._first_s or now_s
            self._last_s = now_s
            self._parts.append(event.text)
            if not self._is_silent:
                print(harmless(event.text), end="", flush=True)
        elif isinstance(event, ShardFailover):
            self._failovers, self._pause_ms = self._failovers + 1, self._pause_ms + event.pause_ms
            if not self._is_silent:
                lost, new = ", ".join(event.lost), ", ".join(event.replaced_by)
                notice(f"\n[failover: {one_line(lost)} → {one_line(new)}, pause {event.pause_ms:.0f} ms]")
        elif isinstance(event, Usage):
            self._counts = AnswerFigures(
                event.prompt_tokens, event.completion_tokens, 0.0, 0.0, event.failovers, event.pause_ms, event.nodes,
                exactness=event.exactness,
            )  # fmt: skip

    def figures(self) -> AnswerFigures:
        """A stopped answer has no usage; its pieces are counted instead, each about a token."""
        counts = self._counts or AnswerFigures(0, len(self._parts), 0.0, 0.0, self._failovers, self._pause_ms, ())
        first_s = self._first_s - self._began_s if self._first_s else 0.0
        return AnswerFigures(
            counts.prompt_tokens, counts.completion_tokens, round(first_s, 4), round(self._last_s - self._first_s, 4),
            counts.failovers, counts.pause_ms, counts.nodes, self.is_stopped, counts.exactness,
        )  # fmt: skip


def figures_line(figures: AnswerFigures) -> str:
    way = " → ".join(node[:8] for node in figures.nodes)
    exactness = "" if figures.exactness == "bitwise" else f", exactness {figures.exactness}"
    failovers = f", {counted(figures.failovers, 'failover')} ({figures.pause_ms:.0f} ms)" if figures.failovers else ""
    return (
        f"[{'stopped, ' if figures.is_stopped else ''}{counted(figures.completion_tokens, 'token')}, {figures.tokens_per_s:.1f} tokens/s, "
        f"first after {figures.first_token_s:.2f} s{f', {way}' if way else ''}{failovers}{exactness}]"
    )


@contextlib.contextmanager
def _line_editing(is_kept: bool) -> Iterator[None]:
    """Arrow keys and history, where Python has readline; the file is its owner's alone."""
    try:
        import readline
    except ImportError:  # Windows: the console edits lines by itself
        yield
        return
    from potluck.node.identity_file import own_folder

    path = own_folder() / "chat-history"
    readline.set_history_length(_HISTORY_LINES)
    if is_kept:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    try:
        yield
    finally:
        if is_kept:
            with contextlib.suppress(
                OSError
            ):  # a folder that cannot be written costs the history, not the conversation
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                readline.write_history_file(path)
