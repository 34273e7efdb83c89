"""`potluck chat`: a conversation at the terminal, streamed through a node's API."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.chat_session import AnswerFigures, Ask, ChatSession, Choose, End, LineGatherer, ListModels, Save, Say
from potluck.cli.console import EXIT_FAILURE, JsonOption, counted, harmless, notice, one_line, print_json, require_utf8
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

    require_utf8(system or "", "--system")
    address = base_url(url) if url is not None else api_url()
    if url is None:
        wait_until_answerable(model)
    with Client(address, None if url is not None else api_key()) as client:
        session = ChatSession(_chosen(client, model, address), system)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        fields = {"temperature": temperature, "max_tokens": max_tokens}
        talk = _Talk(client, address, session, fields, as_json, is_terminal)
        if is_terminal:
            notice(f"{one_line(session.model or '')} at {address}; /help lists the commands, Ctrl-D ends")
        with _line_editing(history) if is_terminal else contextlib.nullcontext():
            talk.run()
    if as_json:
        print_json(session.saved())
    if talk.has_failed and not is_terminal:
        raise typer.Exit(EXIT_FAILURE)


def base_url(url: str) -> str:
    """As people type it: with or without http:// and /v1. Raises BadRequest for what cannot be an address."""
    import httpx

    full = url if "://" in url else f"http://{url}"
    try:
        httpx.URL(full)
    except httpx.InvalidURL as error:
        raise BadRequest(f"{url} is not an address ({str(error)[:1].lower()}{str(error)[1:]})", "--url") from None
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
    except ValueError:  # no JSON
        raise ChatFailed(f"what answers at {address} is not a node of Potluck, nor like OpenAI's API") from None
    except ApiError as error:
        hint = "; set POTLUCK_API_KEY to that node's key" if error.status == 401 else ""
        raise ChatFailed(f"{error}{hint}") from None


class _Talk:
    """Reads, asks, prints. Ctrl-C while an answer comes ends that answer; while typing it drops the line.

    At a terminal nothing that fails ends the conversation. Elsewhere a command that fails does, and bytes that are no text:
    what follows in the input was meant for another state of things.
    """

    def __init__(
        self, client: "Client", address: str, session: ChatSession, fields: dict[str, float], is_silent: bool,
        is_terminal: bool,
    ) -> None:  # fmt: skip
        self._client, self._address, self._session, self._fields = client, address, session, fields
        self._is_silent, self._is_terminal = is_silent, is_terminal
        self._lines = LineGatherer()
        self.has_failed = False

    def run(self) -> None:
        while True:
            try:
                text = self._lines.add(self._line())
            except EOFError:
                return self._finish()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                self._lines.drop()
                print("\n(Ctrl-D ends)")
                continue
            except BadRequest as error:
                if not self._is_terminal:
                    raise
                notice(f"error: {error}")
                continue
            if text is not None and not self._do(text):
                return None

    def _line(self) -> str:
        prompt = _MORE if self._lines.is_open else _PROMPT
        try:
            return require_utf8(input(prompt if self._is_terminal else ""), "the question")
        except UnicodeDecodeError:
            raise BadRequest("the question is not UTF-8 text") from None

    def _finish(self) -> None:
        """The input has ended: what it left open is a question all the same; whoever types Ctrl-D there wants none."""
        if self._is_terminal:
            print()
            return notice("the text that you had begun was not asked") if self._lines.is_open else None
        if self._lines.is_open:
            self._do(self._lines.rest())
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
            case ListModels() | Choose() as deed:
                self._use_models(deed)
            case Ask():
                self._answer()
        return True

    def _use_models(self, deed: ListModels | Choose) -> None:
        try:
            if isinstance(deed, ListModels):
                return notice("\n".join(one_line(name) for name in _models(self._client, self._address)))
            self._session.model = _chosen(self._client, deed.model, self._address)
        except PotluckError as error:
            if not self._is_terminal:
                raise ChatFailed(str(error)) from None
            return notice(f"error: {one_line(str(error))}")
        return notice(f"the next answer is from {one_line(deed.model)}")

    def _save(self, path: str) -> None:
        import msgspec

        try:
            Path(path).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(self._session.saved())))
        except OSError as error:
            self.has_failed = True
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
            self.has_failed = True
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
