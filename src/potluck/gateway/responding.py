"""One request from its turn to its last byte: admission, generations, stream or body, and the client that goes away meanwhile.

The ASGI channel is watched here and not left to the framework: a client that disconnects ends its generations at once, also while
the prompt is still being read by the shards and nothing has been sent yet.
"""

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from potluck.core.errors import GenerationAborted, MethodNotAllowed, PotluckError, ShardsFull
from potluck.gateway.admission import AdmissionSettings, Tier
from potluck.gateway.answering import Answering, OpenModel
from potluck.gateway.error_table import row_of
from potluck.gateway.events import ChoiceFinished, Diagnostics, Event
from potluck.gateway.figures import Figures
from potluck.gateway.gate import Gate
from potluck.gateway.preparing import Prepared, prepare
from potluck.gateway.reader_pace import ReaderPace
from potluck.gateway.request import InferenceRequest
from potluck.gateway.resuming import EventNumbers, ResumableAnswer
from potluck.gateway.running import LOOK_AGAIN_S, MAX_PARALLEL_CHOICES, Run
from potluck.gateway.surface import SSE, CollectedChoice, Surface, one_line, sse, sse_comment
from potluck.orchestrator.frames import ShardFailover
from potluck.orchestrator.generation import GenerationRequest

_log = logging.getLogger(__name__)
DiagnosticsMode = Literal["off", "events", "comments"]
_INLINE_BYTES = 4_096  # a body up to here is read and tokenized in the loop; a larger one beside it
# Of their own, and few: megabytes of text take seconds each, and weights and files wait for the loop's usual threads. What is queued goes
# with the client that asked for it.
_TEXT_THREADS = ThreadPoolExecutor(2, thread_name_prefix="potluck-text")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    admission: AdmissionSettings = AdmissionSettings()
    default_max_tokens: int = 4096  # of a chat that names no limit; shards reserve memory for it
    keep_alive_s: float = 10.0
    reader_patience_s: float = (
        60.0  # with a client that does not take what is sent to it; it has a turn that others wait for
    )
    least_reading_bytes_per_s: float = (
        4096.0  # over so much time in which it is waited for; far below any network of today
    )
    status_wait_s: float = 1.0  # a stream's status is held back so long for failures that come at once


class ReaderStalled(Exception):
    """A client that takes nothing of its answer, or next to nothing, and does not go away either."""


class Caller(NamedTuple):
    """Who asks: a name to be fair by, and what it may."""

    client: str
    tier: Tier
    diagnostics: DiagnosticsMode = "off"


class Service:
    """What all requests share."""

    def __init__(self, answering: Answering, settings: ServiceSettings) -> None:
        self.answering, self.settings = answering, settings
        self.gate = Gate(settings.admission)
        self.figures = Figures(self.gate.admission)
        self.is_closing = False  # answers that run now are cancelled soon, and their readers told why

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @asynccontextmanager
    async def run(
        self,
        model: OpenModel,
        request: InferenceRequest,
        size_bytes: int,
        caller: Caller,
        label: str,
        resumable: ResumableAnswer | None = None,
    ) -> AsyncIterator[tuple[Run, Prepared]]:
        """Waits for a turn, prepares, and starts; the turn is given back when the block is left."""
        began_s = self.now_s()
        parallel = min(MAX_PARALLEL_CHOICES, self.settings.admission.max_sessions or MAX_PARALLEL_CHOICES)
        async with self.gate.turn(caller.client, caller.tier, min(request.choice_count, parallel)):
            prepared = (await self._prepared(model, request, size_bytes)).owned_by(caller.client)
            await self._until_there_is_room(model, prepared.choices[0].request)
            if resumable is not None:
                prepared = await resumable.settle(model, prepared)
            patience_s = self.settings.admission.patience_s
            async with Run(model, prepared, self.now_s, label, parallel, patience_s) as run:
                yield run, prepared
            self.figures.note(run.usage(), self.now_s() - began_s)

    async def _until_there_is_room(self, model: OpenModel, request: GenerationRequest) -> None:
        """Other nodes send requests to the same shards, and nobody tells us when one of those ends: so look again and again."""
        give_up_s = self.now_s() + self.settings.admission.patience_s
        while True:
            try:
                return model.check(request)
            except ShardsFull:
                if self.now_s() >= give_up_s:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _prepared(self, model: OpenModel, request: InferenceRequest, size_bytes: int) -> Prepared:
        return await beside_the_loop(size_bytes, prepare, model, request, self.settings.default_max_tokens)


async def beside_the_loop(size_bytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What takes long for a large body must not hold up everybody else's answers."""
    if size_bytes <= _INLINE_BYTES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_TEXT_THREADS, functools.partial(work, *args, **kwargs))


class GenerationResponse(Response):
    """Answers one request on its surface, streamed or whole."""

    def __init__(
        self, service: Service, request: InferenceRequest, surface: Surface, size_bytes: int, caller: Caller,
        resumable: ResumableAnswer | None = None,
    ) -> None:  # fmt: skip
        """`resumable`: the events get ids, after each of which another node can go on."""
        self._service, self._request, self._surface = service, request, surface
        self._resumable = resumable
        self._numbers: EventNumbers | None = None
        self._told_s = 0.0  # when its client last heard something, while it is told nothing new
        self._size_bytes, self._caller = size_bytes, caller
        self._has_begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._answer(self._patiently(send)))
        except ReaderStalled:
            _log.warning("a client stopped reading, or nearly so; its answer is ended")
        except asyncio.CancelledError:
            if not self._service.is_closing:  # otherwise all is said, and the server waits for this to end
                raise

    def _patiently(self, send: Send) -> Send:
        settings, now_s = self._service.settings, self._service.now_s
        pace = ReaderPace(settings.reader_patience_s, settings.least_reading_bytes_per_s)

        async def send_in_time(message: Message) -> None:
            began_s = now_s()
            try:
                async with asyncio.timeout(settings.reader_patience_s):
                    await send(message)
            except TimeoutError:
                raise ReaderStalled from None
            if not pace.is_kept(now_s() - began_s, len(message.get("body", b""))):
                raise ReaderStalled

        return send_in_time

    async def _answer(self, send: Send) -> None:
        try:
            model = await self._service.answering.open(self._request.model)
            self._surface.model = model.card.id
            async with self._service.run(
                model, self._request, self._size_bytes, self._caller, self._surface.request_id, self._resumable
            ) as (run, prepared):
                if self._surface.is_streaming:
                    await self._stream(run, prepared, send)
                else:
                    await self._whole(run, prepared, send)
        except ReaderStalled:
            raise
        except asyncio.CancelledError:
            if not self._service.is_closing:
                raise
            await self._fail(GenerationAborted("node_stopping", "the node that was asked is being ended"), send)
        except Exception as error:
            if not isinstance(error, PotluckError):
                _log.exception("a request failed inside")
            self._service.figures.failed(row_of(error).code)
            await self._fail(error, send)

    async def _whole(self, run: Run, prepared: Prepared, send: Send) -> None:
        choices = {choice.index: CollectedChoice(choice.index) for choice in prepared.choices}
        while (event := await run.next()) is not None:
            self._count(event)
            choices[event.choice].add(event)
        await send_json(send, 200, self._surface.body(list(choices.values()), run.usage()))

    async def _stream(self, run: Run, prepared: Prepared, send: Send) -> None:
        early = await self._early(run)
        headers = [(b"content-type", _content_type(self._surface.media_type)), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})
        self._has_begun = True
        self._start_numbering(run)
        await _send_part(send, self._numbered(self._surface.begin(prepared.prompt_tokens)))
        for event in early:
            await self._send_event(event, send)
        async for event in self._with_signs_of_life(run, send):
            await self._send_event(event, send)
        last = self._numbered(self._surface.end(run.usage()))
        if self._numbers is not None:
            self._numbers.check_all_made()
        await _send_part(send, last, is_last=True)

    def _start_numbering(self, run: Run) -> None:
        """Now that it has begun: how, belongs to what its ids say."""
        if self._resumable is not None:
            self._numbers = self._resumable.numbers(run.answer)
            self._told_s = self._service.now_s()

    def _numbered(self, events: bytes) -> bytes:
        return events if self._numbers is None else self._numbers.number(events)

    async def _early(self, run: Run) -> list[Event]:
        """What comes soon, to the first that is an answer; a refusal that comes as soon still gets a status of its own."""
        events: list[Event] = []
        silent = 0 if self._resumable is None else self._resumable.events_had
        try:
            async with asyncio.timeout(self._service.settings.status_wait_s):
                while silent >= 0:
                    event = await run.next()
                    if event is None:
                        break
                    events.append(event)
                    silent -= not isinstance(event, Diagnostics)
        except TimeoutError:
            pass
        return events

    async def _with_signs_of_life(self, run: Run, send: Send) -> AsyncIterator[Event]:
        """Events to the end; where none comes for long, a sign of life goes out."""
        while True:
            try:
                async with asyncio.timeout(self._service.settings.keep_alive_s):
                    event = await run.next()
            except TimeoutError:
                await _send_part(send, self._surface.keep_alive())
                continue
            if event is None:
                return
            if self._numbers is not None and self._numbers.is_silent:
                await self._break_silence(send)
            yield event

    async def _break_silence(self, send: Send) -> None:
        """What the client has had is made again, and it hears nothing of that."""
        if self._service.now_s() - self._told_s >= self._service.settings.keep_alive_s:
            self._told_s = self._service.now_s()
            await _send_part(send, self._surface.keep_alive())

    async def _send_event(self, event: Event, send: Send) -> None:
        self._count(event)
        if not isinstance(event, Diagnostics):
            return await _send_part(send, self._numbered(self._surface.event(event)))
        if self._numbers is not None and isinstance(event.frame, ShardFailover) and event.frame.exactness != "bitwise":
            self._numbers.cannot_be_made_again()
        if self._caller.diagnostics == "off" or self._surface.media_type != SSE:
            return None
        name = str(event.frame.__struct_config__.tag)
        shown = msgspec.to_builtins(event.frame) | {"choice": event.choice}
        if self._caller.diagnostics == "events":
            return await _send_part(send, sse(shown, name))
        return await _send_part(send, sse_comment(f"{name} {one_line(shown).decode()}"))

    def _count(self, event: Event) -> None:
        if isinstance(event, ChoiceFinished):
            self._service.figures.finished(event.reason)

    async def _fail(self, error: Exception, send: Send) -> None:
        if self._has_begun:
            if self._numbers is not None and isinstance(error, GenerationAborted):
                error.resume = self._numbers.last_id
            return await _send_part(send, self._surface.failure(error), is_last=True)
        return await send_error(send, error, self._surface.error_body(error))


async def unless_disconnected(receive: Receive, work: Awaitable[None]) -> None:
    """Runs `work`; a client that goes away cancels it. Ends when both have ended."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, data: bytes, is_last: bool = False) -> None:
    if data or is_last:
        message: Message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await send(message)


async def send_json(send: Send, status: int, body: object, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    data = msgspec.json.encode(body)
    length = (b"content-length", str(len(data)).encode())
    shown = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: Exception, body: object, is_last: bool = False) -> None:
    """The status and headers of the table, and the body in whichever form the client knows.

    `is_last`: the connection ends with it, because a body may still be coming that nobody wants to read.
    """
    headers = [*_error_headers(error), *([(b"connection", b"close")] if is_last else [])]
    await send_json(send, row_of(error).status, body, tuple(headers))


def _error_headers(error: Exception) -> list[tuple[bytes, bytes]]:
    row = row_of(error)
    headers = []
    if row.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(row.retry_after_s)).encode()))
    elif row.status >= 500:
        headers.append((b"x-should-retry", b"false"))  # SDKs ask again after any 5xx unless they are told not to
    if row.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed) and error.allowed:
        headers.append((b"allow", error.allowed.encode("latin-1")))
    return headers


def _content_type(media_type: str) -> bytes:
    return f"{media_type}; charset=utf-8".encode() if media_type == SSE else media_type.encode()
