"""Runs the generations of one request, all choices side by side, as one stream of events. Owns their tasks.

Closing a run ends every generation of it, wherever it is: in the queue of a shard, in prefill, or between two tokens.
"""

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType

from potluck.core.errors import GenerationAborted, ResumeImpossible, ShardsFull
from potluck.core.exactness import Exactness, weakest
from potluck.gateway.answering import Answer, OpenModel
from potluck.gateway.choice import ChoiceStream
from potluck.gateway.events import Diagnostics, Event, PromptShown, TextDelta, Usage
from potluck.gateway.pipeline_features import prompt_logprobs_of
from potluck.gateway.preparing import Prepared, PreparedChoice
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, ShardStatus, StreamFrame, TokenDelta
from potluck.orchestrator.request import GenerationRequest

_MAX_WAITING_EVENTS = 64
LOOK_AGAIN_S = 0.1  # whether a shard has room
MAX_PARALLEL_CHOICES = 4


class _Ended:
    """A choice has come to its end."""


class Run:
    """`async with Run(…) as run`, then `await run.next()` until None. The first failure ends everything and is raised."""

    def __init__(
        self, model: OpenModel, prepared: Prepared, now_s: Callable[[], float], label: str = "",
        parallel: int = MAX_PARALLEL_CHOICES, patience_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`parallel`: so many choices at once; the others follow. `patience_s`: of each, where every shard is full when its turn comes."""
        self._model, self._prepared, self._now_s, self._label = model, prepared, now_s, label
        self._events: asyncio.Queue[Event | _Ended | Exception] = asyncio.Queue(_MAX_WAITING_EVENTS)
        self._turns = asyncio.Semaphore(parallel)
        self._patience_s = patience_s
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(prepared.choices)
        self._began_s = now_s()
        self._first_s: float | None = None
        self._tokens = self._failovers = self._reused = 0
        self._pause_s = 0.0
        self._nodes: list[str] = []
        self.answer: Answer | None = None  # the last that was started
        self._exactness: dict[int, Exactness] = {}  # by choice

    async def __aenter__(self) -> "Run":
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._guarded(choice)) for choice in self._prepared.choices]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> Event | None:
        """The next event; None at the end. Can be given up (by a time-out) and called again without losing any."""
        while self._left:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if not isinstance(event, _Ended):
                return event
            self._left -= 1
        return None

    def usage(self) -> Usage:
        now = self._now_s()
        return Usage(
            prompt_tokens=self._prepared.prompt_tokens, completion_tokens=self._tokens, failovers=self._failovers,
            pause_s=self._pause_s, nodes=tuple(self._nodes), exactness=weakest(self._exactness.values()),
            first_token_s=(self._first_s or now) - self._began_s, total_s=now - self._began_s, cached_tokens=self._reused,
        )  # fmt: skip

    async def _guarded(self, choice: PreparedChoice) -> None:
        try:
            async with self._turns:
                await self._generate(choice)
        except Exception as error:  # whoever reads the events raises it
            await self._events.put(error)
        else:
            await self._events.put(_Ended())

    async def _generate(self, choice: PreparedChoice) -> None:
        stream = ChoiceStream(choice.index, self._model.tokenizer, choice.settings, choice.new_call_id)
        if choice.echoed:
            await self._events.put(TextDelta(choice.index, choice.echoed))
        for frame in _begun_frames(choice.request):
            if await self._take(frame, stream, choice):
                return
        give_up_s = self._now_s() + self._patience_s
        while True:
            try:
                return await self._answer(stream, choice)
            except (
                ShardsFull
            ):  # said before anything else: another choice, or another node, took the room that was there
                if self._now_s() >= give_up_s:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _answer(self, stream: ChoiceStream, choice: PreparedChoice) -> None:
        self.answer = answer = self._model.start(choice.request, self._label)
        frames = answer.frames()
        try:
            async for frame in frames:
                if await self._take(frame, stream, choice):
                    return
        finally:
            self._note_nodes(answer)
            self._exactness.setdefault(choice.index, answer.exactness)
            closing = getattr(frames, "aclose", None)
            if closing is not None:
                await closing()

    async def _take(self, frame: StreamFrame, stream: ChoiceStream, choice: PreparedChoice) -> bool:
        """Whether that was the end."""
        if choice.remembered or choice.must_be_bitwise:
            _check_same(frame, stream.token_count, choice)
        for event in self._on_frame(frame, stream, choice.request):
            await self._events.put(event)
        if stream.is_stopped:
            for event in stream.finish("stop"):
                await self._events.put(event)
            return True
        if isinstance(frame, PipelineAborted):
            raise GenerationAborted(frame.code, frame.message)
        return isinstance(frame, Finished)

    def _on_frame(self, frame: StreamFrame, stream: ChoiceStream, request: GenerationRequest) -> list[Event]:
        if isinstance(frame, Finished | ShardFailover):
            self._exactness[stream.choice] = frame.exactness
        if isinstance(frame, TokenDelta):
            self._tokens += 1
            self._first_s = self._first_s or self._now_s()
            return stream.push(frame)
        if isinstance(frame, Finished):
            self._reused += frame.reused_tokens if request.choice == 0 else 0  # a prompt counts once, whatever `n` is
            return stream.finish("length" if frame.reason == "length" else "stop")
        shown = prompt_logprobs_of(frame, request.prompt, self._model.tokenizer)
        if shown is not None:
            return [PromptShown(stream.choice, shown)]
        if isinstance(frame, ShardFailover):
            self._failovers += 1
            self._pause_s += frame.pause_ms / 1000
        if isinstance(frame, ShardStatus | ShardFailover | PipelineAborted):
            return [Diagnostics(stream.choice, frame)]
        return []

    def _note_nodes(self, answer: Answer) -> None:
        self._nodes += [node for node in answer.nodes if node not in self._nodes]


def _begun_frames(request: GenerationRequest) -> Iterator[StreamFrame]:
    """What was generated elsewhere, as if it came now; with its end, where it had come to one."""
    count = len(request.begun)
    for index, token in enumerate(request.begun):
        if token in request.eos:
            yield Finished("stop", count, 0)
            return
        yield TokenDelta(token, len(request.prompt) + index)
    if count >= request.max_tokens > 0:
        yield Finished("length", count, 0)


def _check_same(frame: StreamFrame, index: int, choice: PreparedChoice) -> None:
    """An answer that is made again must become the one that its reader has the beginning of."""
    if isinstance(frame, TokenDelta) and index < len(choice.remembered) and frame.token != choice.remembered[index]:
        raise ResumeImpossible("made again, the answer came out differently")
    if choice.must_be_bitwise and isinstance(frame, ShardFailover) and frame.exactness != "bitwise":
        raise ResumeImpossible("a machine was lost whose stand-in computes differently; try again")
