"""Brings a stage's weights from peers into the store: dials links for bulk, carries out what `PeerFetch` decides, checks off the loop.

Every chunk goes through `PartialModel.put`, which compares it with the manifest before it writes.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from potluck.core.errors import (
    BadModelFile,
    LinkError,
    ModelNotFound,
    PotluckError,
    ShardUnavailable,
    WeightsMismatch,
    WeightsMissing,
    WeightsUnavailable,
)
from potluck.identity.keys import short_id
from potluck.net.link import Transport
from potluck.node.bulk_peer import BulkPeer, WeightSource
from potluck.orchestrator.questions import TEXT_SIDE_TIMEOUT_S
from potluck.weights.file_copy import file_faults, require_space
from potluck.weights.manifest import Manifest, decode_manifest, weights_sha256
from potluck.weights.partial_model import PartialModel, decode_tokenizer
from potluck.weights.peer_fetch import OUTSIDE, Ask, FetchSettings, Leave, PeerFetch, SourceReport
from potluck.weights.progress import Progress, Silence
from potluck.weights.store import ModelStore
from potluck.weights.units import shown_units, stage_units, unit_of
from potluck.wire.messages import (
    ChunkData,
    Failed,
    GetHoldings,
    GetTokenizer,
    Holdings,
    Message,
    Stage,
    TokenizerData,
)

__all__ = ["FetchReport", "Outside", "WeightFetch", "WeightSource", "check_text_side", "tensors_in"]

_CHECKERS = 2  # threads that hash and write
_ADVICE = "free some space, or mend the folder"

T = TypeVar("T")

Outside = Callable[[str, int], bytes]
"""(tensor, chunk) → its bytes, from a file or a hub. Called in a thread, for what no peer gives; may raise PotluckError, OSError."""


class FetchReport(msgspec.Struct, frozen=True):
    """What a fetch did. `verify_s` and `write_s` are thread time; bytes are verified ones."""

    size_bytes: int
    seconds: float
    verify_s: float
    write_s: float
    sources: tuple[SourceReport, ...]

    @property
    def megabytes_per_s(self) -> float:
        return self.size_bytes / 1e6 / self.seconds if self.seconds else 0.0


class WeightFetch:
    """One fetch. `run` it once; when it returns or raises, no link, thread or task of it is left."""

    def __init__(
        self,
        transport: Transport,
        store: ModelStore,
        *,
        model_id: str,
        weights_sha256: str,
        stage: Stage,
        sources: Sequence[WeightSource],
        outside: Outside | None = None,
        progress: Progress | None = None,
        settings: FetchSettings | None = None,
    ) -> None:
        self._transport, self._store = transport, store
        self._model_id, self._weights, self._stage = model_id, weights_sha256, stage
        self._sources, self._outside = tuple(sources), outside
        self._progress = progress or Silence()
        self._settings = settings
        self._peers: dict[bytes, BulkPeer] = {}
        self._problems: list[str] = []  # sources that could not be used at all
        self._joining = 0  # sources that may still become useful
        self._tasks: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._fetch: PeerFetch | None = None
        self._finished: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<WeightFetch {self._model_id} {self._fetch!r}>"

    async def run(self) -> FetchReport:
        """Raises WeightsUnavailable, WeightsMismatch, DownloadFailed (disk), BadRequest (somebody else is at it)."""
        began_s = time.perf_counter()
        if await asyncio.to_thread(self._is_held):
            return FetchReport(0, 0.0, 0.0, 0.0, ())
        self._checkers = ThreadPoolExecutor(_CHECKERS, "weights")
        try:
            dials = [self._own(self._dial(source)) for source in self._sources]
            partial = await self._prepare(dials)
            with file_faults(_ADVICE), self._store.working_on(self._model_id):
                fetch = await self._fetch_missing(partial, dials)
            seconds = time.perf_counter() - began_s
            times = partial.times
            return FetchReport(fetch.done_bytes, seconds, times.verify_s, times.write_s, fetch.report())
        finally:
            await self._end()

    # ------------------------------------------------------------ preparing

    def _is_held(self) -> bool:
        known = self._store.find_weights(self._weights)
        if known is None:
            return False
        self._model_id = known.id
        if known.format != "partial":
            return True
        partial = self._store.partial(known.id)
        return not partial.missing_units(stage_units(partial.manifest.facts, self._stage))

    async def _prepare(self, dials: Sequence["asyncio.Task[BulkPeer | None]"]) -> PartialModel:
        """The partial model to fetch into: the one in the store, or a new one with a manifest that some peer gave."""
        known = await asyncio.to_thread(self._store.find_weights, self._weights)
        if known is not None:
            return await asyncio.to_thread(self._store.partial, known.id)
        manifest, tokenizer = await self._text_side(dials)
        with file_faults(_ADVICE):
            return await asyncio.to_thread(
                self._store.create_partial, self._model_id, manifest, tokenizer, f"peers:{self._weights[:12]}"
            )

    async def _dial(self, source: WeightSource) -> BulkPeer | None:
        peer = BulkPeer(source, self._on_answer, self._on_gone)
        try:
            await peer.dial(self._transport)
        except (PotluckError, OSError) as error:
            self._problems.append(f"{short_id(source.node)}: {error}")
            peer.close()
            return None
        self._peers[source.node] = peer
        return peer

    async def _text_side(self, dials: Sequence["asyncio.Task[BulkPeer | None]"]) -> tuple[Manifest, bytes]:
        """Manifest and tokenizer from the first peer that has what the hash covers."""
        for dialled in asyncio.as_completed(dials):
            peer = await dialled
            if peer is None:
                continue
            try:
                answer, body = await peer.question(
                    lambda nonce: GetTokenizer(nonce, self._weights), TEXT_SIDE_TIMEOUT_S
                )
                return await asyncio.to_thread(check_text_side, answer, body, self._weights)
            except PotluckError as error:
                self._problems.append(f"{short_id(peer.source.node)}: {error}")
                if isinstance(error, WeightsMismatch | BadModelFile):
                    self._forget(peer)
        raise WeightsUnavailable(
            f"nobody has the manifest of {self._model_id}: {'; '.join(self._problems) or 'no sources'}"
        )

    async def _join(self, dial: "asyncio.Task[BulkPeer | None]", manifest: Manifest) -> None:
        """Asks a peer what it has, and puts it to work."""
        peer = await dial
        try:
            if peer is not None and peer.source.node in self._peers:
                answer, _ = await peer.question(lambda nonce: GetHoldings(nonce, self._weights))
                assert self._fetch is not None
                self._fetch.add_source(peer.source.node, tensors_in(answer, manifest), self._now_s())
        except PotluckError as error:
            assert peer is not None
            self._problems.append(f"{short_id(peer.source.node)}: {error}")
            self._forget(peer)
        finally:
            self._joining -= 1
        self._pump()

    # ------------------------------------------------------------ fetching

    async def _fetch_missing(
        self, partial: PartialModel, dials: Sequence["asyncio.Task[BulkPeer | None]"]
    ) -> PeerFetch:
        wanted = stage_units(partial.manifest.facts, self._stage)
        missing = await asyncio.to_thread(partial.begin, wanted, self._progress)
        require_space(partial.folder, sum(chunk.size_bytes for chunk in missing))
        self._partial, self._fetch = partial, PeerFetch(missing, self._settings)
        self._finished = asyncio.get_running_loop().create_future()
        self._progress.start(f"fetching {self._model_id}", self._fetch.total_bytes)
        self._joining = len(dials)
        for dial in dials:
            self._own(self._join(dial, partial.manifest))
        self._pump()
        try:
            await self._finished
        finally:
            self._progress.finish()
        return self._fetch

    def _pump(self) -> None:
        """Does what is to be done now, and notices the end."""
        fetch, finished = self._fetch, self._finished
        if fetch is None or finished is None or finished.done():
            return
        now_s = self._now_s()
        if self._outside is not None and not self._joining and not fetch.has_source(OUTSIDE):
            fetch.add_source(OUTSIDE, fetch.missing_tensors, now_s)  # every peer has said what it holds
        while actions := fetch.advance(now_s):
            for action in actions:
                self._carry_out(fetch, action)
        if fetch.is_done:
            finished.set_result(None)
        elif fetch.is_stuck(now_s) and not self._joining:
            finished.set_exception(WeightsUnavailable(self._explain(fetch)))
        else:
            self._set_timer(fetch.next_wake_s(now_s))

    def _set_timer(self, wake_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wake_s is None else asyncio.get_running_loop().call_at(wake_s, self._pump)

    def _carry_out(self, fetch: PeerFetch, action: Ask | Leave) -> None:
        peer = self._peers.get(action.source)
        if isinstance(action, Leave):
            if peer is not None:
                self._forget(peer)
        elif action.source == OUTSIDE:
            self._own(self._ask_outside(fetch, action))
        else:
            try:
                assert peer is not None
                peer.ask(action, self._weights)
            except LinkError:
                fetch.lose_source(action.source)

    async def _ask_outside(self, fetch: PeerFetch, ask: Ask) -> None:
        assert self._outside is not None
        try:
            data = await asyncio.to_thread(self._outside, ask.tensor, ask.chunk)
        except (PotluckError, OSError) as error:
            self._problems.append(f"outside: {error}")
            fetch.on_refused(OUTSIDE, ask.tensor, ask.chunk, is_held=True, now_s=self._now_s())
        else:
            if fetch.on_arrived(OUTSIDE, ask.tensor, ask.chunk, self._now_s()):
                await self._check(fetch, ask, data)
        self._pump()

    def _on_answer(self, peer: BulkPeer, ask: Ask, answer: ChunkData | Failed, body: bytes) -> None:
        fetch = self._fetch
        assert fetch is not None
        if isinstance(answer, Failed):
            is_held = answer.code not in (WeightsMissing.code, ModelNotFound.code)
            fetch.on_refused(ask.source, ask.tensor, ask.chunk, is_held, self._now_s())
        elif fetch.on_arrived(ask.source, ask.tensor, ask.chunk, self._now_s()):
            self._own(self._check(fetch, ask, body))
        self._pump()

    async def _check(self, fetch: PeerFetch, ask: Ask, data: bytes) -> None:
        """Off the loop; how many wait here is bounded by the sources' windows."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._checkers, self._partial.put, ask.tensor, ask.chunk, data)
        except WeightsMismatch:
            fetch.on_checked(ask.source, ask.tensor, ask.chunk, is_right=False)
        except OSError as error:
            if self._finished is not None and not self._finished.done():
                self._finished.set_exception(error)
            return
        else:
            fetch.on_checked(ask.source, ask.tensor, ask.chunk, is_right=True)
            self._progress.advance(len(data))
        self._pump()

    # ------------------------------------------------------------ ending

    def _on_gone(self, peer: BulkPeer) -> None:
        self._peers.pop(peer.source.node, None)
        if self._fetch is not None:
            self._fetch.lose_source(peer.source.node)
            self._pump()

    def _forget(self, peer: BulkPeer) -> None:
        self._peers.pop(peer.source.node, None)
        peer.close()

    def _explain(self, fetch: PeerFetch) -> str:
        """What is missing, and what was wrong with each source."""
        assert self._partial is not None
        layer_count = self._partial.manifest.facts.layer_count
        what = shown_units({unit_of(tensor) for tensor in fetch.missing_tensors}, layer_count)
        faults = [_told(each) for each in fetch.report() if each.faults or each.gone]
        reasons = "; ".join([*self._problems[-8:], *faults]) or "no source has it"
        return f"{what} of {self._model_id} cannot be had: {reasons}"

    def _own(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for peer in list(self._peers.values()):
            self._forget(peer)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A thread that hashes cannot be stopped; it takes milliseconds.
        await asyncio.to_thread(self._checkers.shutdown, wait=True, cancel_futures=True)


def check_text_side(answer: Message, body: bytes, expected: str) -> tuple[Manifest, bytes]:
    if not isinstance(answer, TokenizerData) or answer.manifest_bytes + answer.tokenizer_bytes != len(body):
        raise WeightsMismatch("a peer answered with something else than a manifest and a tokenizer")
    manifest = decode_manifest(body[: answer.manifest_bytes], "a peer's manifest")
    if weights_sha256(manifest) != expected:
        raise WeightsMismatch("a peer sent the manifest of another model")
    tokenizer = body[answer.manifest_bytes :]
    decode_tokenizer(tokenizer, manifest, "what a peer sent")
    return manifest, tokenizer


def tensors_in(answer: Message, manifest: Manifest) -> set[str]:
    if not isinstance(answer, Holdings):
        raise ShardUnavailable("a peer answered with something else than what it holds")
    names = [record.name for record in manifest.tensors]
    return {name for start, stop in answer.ranges for name in names[start:stop]}


def _told(report: SourceReport) -> str:
    name = short_id(report.source) if report.source else "outside"
    faults = ", ".join(f"{reason} {count}×" for reason, count in report.faults.items())
    return f"{name}: {faults}" if faults else f"{name}: {report.gone}"
