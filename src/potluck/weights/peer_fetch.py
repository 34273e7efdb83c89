"""Which chunk to ask of whom next, when several peers have parts of a model and some of them are slow, gone or liars. No I/O, no clock.

Whoever drives it sends what `advance` returns, and reports what came back; hashes are compared elsewhere, only the verdict is told here.
Healthy sources share the work in the manifest's order; one that erred is asked for what nobody better has; the outside comes last.
"""

import enum
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from potluck.weights.manifest import CHUNK_BYTES
from potluck.weights.units import MissingChunk

OUTSIDE = b""  # the id of what is no peer: a file or a hub


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True):
    window_bytes: int = 8 * CHUNK_BYTES  # asked of one source and not verified yet; bounds memory too
    window_requests: int = 32
    silence_s: float = 10.0  # a source that owes chunks and says nothing for so long has stalled
    chunk_deadline_s: float = 60.0  # for one chunk, however lively its source is otherwise
    steal_after_s: float = 0.5  # a chunk that one source owes for so long may be asked of an idle one too
    lies_allowed: int = 1
    stalls_allowed: int = 2
    refusals_allowed: int = 8
    refusal_pause_s: float = 0.25


class Fault(enum.StrEnum):
    """Why a source is trusted less; the words appear in reports and metrics."""

    WRONG = "wrong_bytes"
    LATE = "late"
    REFUSED = "refused"
    LOST = "lost"


class Ask(msgspec.Struct, frozen=True):
    source: bytes
    tensor: str
    chunk: int


class Leave(msgspec.Struct, frozen=True):
    """This source is not used any more: its link may be closed."""

    source: bytes
    reason: str


Action = Ask | Leave


@dataclass(eq=False)
class _Chunk:
    tensor: str
    number: int
    size_bytes: int
    asked_of: dict[bytes, float] = field(default_factory=dict)  # source: since when it owes it
    lied_about_by: set[bytes] = field(default_factory=set)
    checked_from: bytes | None = None  # whose bytes are being compared with the hash now
    is_done: bool = False


@dataclass(eq=False)
class _Source:
    id: bytes
    tensors: set[str]
    owes: dict[tuple[str, int], _Chunk] = field(default_factory=dict)
    owed_bytes: int = 0
    last_heard_s: float = 0.0
    paused_until_s: float = 0.0
    chunks: int = 0  # right ones
    chunk_bytes: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    has_erred: bool = False  # sent wrong bytes, or was late
    gone: str | None = None  # why it is not used any more

    @property
    def tier(self) -> int:
        """0: as good as any; 1: has erred, asked for what no better one has; 2: outside, asked for what no peer has."""
        return 2 if self.id == OUTSIDE else int(self.has_erred)


class SourceReport(msgspec.Struct, frozen=True):
    source: bytes
    chunks: int
    size_bytes: int
    faults: dict[str, int]
    gone: str | None


class PeerFetch:
    """One fetch, from the first question to the last verified chunk."""

    def __init__(self, missing: Sequence[MissingChunk], settings: FetchSettings | None = None) -> None:
        self.settings = settings or FetchSettings()
        self.total_bytes = sum(chunk.size_bytes for chunk in missing)
        self.done_bytes = 0
        self.duplicates = 0
        self._chunks = {(each.tensor, each.chunk): _Chunk(*each) for each in missing}
        self._left = len(self._chunks)
        self._sources: dict[bytes, _Source] = {}
        self._pending: dict[str, deque[_Chunk]] = {}  # by tensor, in the manifest's order
        self._contested: dict[str, set[_Chunk]] = {}  # pending ones about which somebody lied
        for chunk in self._chunks.values():
            self._pending.setdefault(chunk.tensor, deque()).append(chunk)
        self._tensors = list(self._pending)
        self._numbers = {tensor: number for number, tensor in enumerate(self._tensors)}
        self._first = 0  # nothing is pending of the tensors before this one
        self._checking = 0
        self._leaving: list[Leave] = []

    def __repr__(self) -> str:
        live = sum(source.gone is None for source in self._sources.values())
        return f"<PeerFetch {self.done_bytes} of {self.total_bytes} bytes from {live} of {len(self._sources)} sources>"

    # ------------------------------------------------------------ what is told

    def add_source(self, source: bytes, tensors: Collection[str], now_s: float) -> None:
        """`tensors`: what it says it has whole. A source that was banned stays banned."""
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = _Source(source, set(tensors) & set(self._tensors), last_heard_s=now_s)
        elif known.gone == Fault.LOST:
            known.gone, known.tensors, known.last_heard_s = None, set(tensors) & set(self._tensors), now_s

    def has_source(self, source: bytes) -> bool:
        return source in self._sources

    def lose_source(self, source: bytes) -> None:
        """Its link broke. What it owed is asked elsewhere; it may be added again."""
        if (known := self._live(source)) is not None:
            known.faults[Fault.LOST] += 1
            self._dismiss(known, Fault.LOST)

    def ban(self, source: bytes, reason: str) -> None:
        """For what shows outside of chunks: a manifest that is not the model's."""
        if (known := self._live(source)) is not None:
            known.faults[Fault.WRONG] += 1
            self._dismiss(known, reason)

    def on_arrived(self, source: bytes, tensor: str, chunk: int, now_s: float) -> bool:
        """Bytes came. Whether they are worth checking: not where nobody asked for them, or they are there already."""
        known, wanted = self._live(source), self._chunks.get((tensor, chunk))
        if known is None or wanted is None or (tensor, chunk) not in known.owes:
            return False
        known.last_heard_s = now_s
        if wanted.is_done or wanted.checked_from is not None:
            self.duplicates += 1
            self._settle(known, wanted)
            self._repool_if_idle(wanted)
            return False
        wanted.checked_from = source
        self._checking += 1
        return True

    def on_checked(self, source: bytes, tensor: str, chunk: int, is_right: bool) -> None:
        """The verdict about bytes that `on_arrived` took in."""
        wanted, known = self._chunks[tensor, chunk], self._sources[source]
        wanted.checked_from = None
        self._checking -= 1
        self._settle(known, wanted)
        if is_right:
            known.chunks += 1
            known.chunk_bytes += wanted.size_bytes
            self._finish(wanted)
            return
        wanted.lied_about_by.add(source)
        known.faults[Fault.WRONG] += 1
        known.has_erred = True
        if known.gone is None and known.faults[Fault.WRONG] > self.settings.lies_allowed:
            self._dismiss(known, Fault.WRONG)
        self._repool_if_idle(wanted)

    def on_refused(self, source: bytes, tensor: str, chunk: int, is_held: bool, now_s: float) -> None:
        """It cannot give this chunk. `is_held` False: it does not have the tensor; True: not now."""
        known, wanted = self._live(source), self._chunks.get((tensor, chunk))
        if known is None or wanted is None or (tensor, chunk) not in known.owes:
            return
        known.last_heard_s = now_s
        self._settle(known, wanted)
        if not is_held:
            known.tensors.discard(tensor)
        else:
            known.faults[Fault.REFUSED] += 1
            known.paused_until_s = now_s + self.settings.refusal_pause_s
            if known.faults[Fault.REFUSED] > self.settings.refusals_allowed:
                self._dismiss(known, Fault.REFUSED)
        self._repool_if_idle(wanted)

    # ------------------------------------------------------------ what is to be done

    def advance(self, now_s: float) -> list[Action]:
        """Everything that should be said now."""
        for source in self._live_sources():
            self._check_deadlines(source, now_s)
        asks: list[Action] = []
        busy = True
        while busy:  # one each in turn, so that all share the work
            busy = False
            for source in sorted(self._live_sources(), key=lambda each: (each.tier, each.owed_bytes)):
                chunk = self._choose(source, now_s)
                if chunk is not None:
                    self._ask(source, chunk, now_s)
                    asks.append(Ask(source.id, chunk.tensor, chunk.number))
                    busy = True
        leaving, self._leaving = self._leaving, []
        return [*leaving, *asks]

    def next_wake_s(self, now_s: float) -> float | None:
        """When `advance` should be called even if nothing happens; None: never."""
        times = [due_s for source in self._live_sources() if (due_s := self._deadline_s(source)) < math.inf]
        times += [source.paused_until_s for source in self._live_sources() if source.paused_until_s > now_s]
        times += [t for t in self._steal_times() if t > now_s]
        return min(times, default=None)

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def is_stuck(self, now_s: float) -> bool:
        """Right after `advance`: nothing is under way, and nobody could be asked for what is left."""
        if self.is_done or self._checking:
            return False
        return not any(source.owes or source.paused_until_s > now_s for source in self._live_sources())

    @property
    def missing_tensors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chunk.tensor for chunk in self._chunks.values() if not chunk.is_done))

    def report(self) -> tuple[SourceReport, ...]:
        return tuple(
            SourceReport(each.id, each.chunks, each.chunk_bytes, {str(k): v for k, v in each.faults.items()}, each.gone)
            for each in self._sources.values()
        )

    # ------------------------------------------------------------ choosing

    def _choose(self, source: _Source, now_s: float) -> _Chunk | None:
        settings = self.settings
        if now_s < source.paused_until_s or len(source.owes) >= settings.window_requests:
            return None
        if source.owed_bytes >= (1 if source.tier == 1 else settings.window_bytes):
            return None
        return self._next_pending(source) or self._steal(source, now_s)

    def _next_pending(self, source: _Source) -> _Chunk | None:
        while self._first < len(self._tensors) and not self._pending[self._tensors[self._first]]:
            self._first += 1
        better = [other for other in self._live_sources() if other.tier < source.tier]
        for number in range(self._first, len(self._tensors)):
            tensor = self._tensors[number]
            if tensor not in source.tensors:
                continue
            for chunk in self._candidates(tensor, better):
                if source.id not in chunk.lied_about_by and not _can_any_give(better, chunk):
                    self._pending[tensor].remove(chunk)
                    self._contested.get(tensor, set()).discard(chunk)
                    return chunk
        return None

    def _candidates(self, tensor: str, better: list[_Source]) -> Iterator[_Chunk]:
        """Pending chunks of a tensor; where a better source has it, only those about which somebody lied."""
        if any(tensor in other.tensors for other in better):
            return iter(list(self._contested.get(tensor, ())))
        return iter(self._pending[tensor])

    def _steal(self, source: _Source, now_s: float) -> _Chunk | None:
        """At the end: what a slow source owes is asked of an idle one too, the oldest first."""
        if source.owes or source.tier == 2:
            return None
        owed = [
            (since_s, chunk)
            for other in self._live_sources()
            for chunk in other.owes.values()
            if (since_s := self._sole_wait(chunk)) is not None and now_s >= since_s + self.settings.steal_after_s
            if chunk.tensor in source.tensors and source.id not in chunk.lied_about_by
        ]
        return min(owed, key=lambda pair: pair[0])[1] if owed else None

    def _sole_wait(self, chunk: _Chunk) -> float | None:
        """Since when one source alone owes a chunk; None where it is there, or several do."""
        if chunk.is_done or chunk.checked_from is not None or len(chunk.asked_of) != 1:
            return None
        return next(iter(chunk.asked_of.values()))

    def _steal_times(self) -> Iterator[float]:
        live = self._live_sources()
        if all(source.owes for source in live):
            return
        for source in live:
            for chunk in source.owes.values():
                if (since_s := self._sole_wait(chunk)) is not None:
                    yield since_s + self.settings.steal_after_s

    # ------------------------------------------------------------ bookkeeping

    def _ask(self, source: _Source, chunk: _Chunk, now_s: float) -> None:
        if not source.owes:
            source.last_heard_s = now_s
        source.owes[chunk.tensor, chunk.number] = chunk
        source.owed_bytes += chunk.size_bytes
        chunk.asked_of[source.id] = now_s

    def _settle(self, source: _Source, chunk: _Chunk) -> None:
        if source.owes.pop((chunk.tensor, chunk.number), None) is not None:
            source.owed_bytes -= chunk.size_bytes
        chunk.asked_of.pop(source.id, None)

    def _finish(self, chunk: _Chunk) -> None:
        if chunk.is_done:
            return
        chunk.is_done = True
        self._left -= 1
        self.done_bytes += chunk.size_bytes

    def _repool_if_idle(self, chunk: _Chunk) -> None:
        if chunk.is_done or chunk.checked_from is not None or chunk.asked_of or chunk in self._pending[chunk.tensor]:
            return
        self._pending[chunk.tensor].appendleft(chunk)
        if chunk.lied_about_by:
            self._contested.setdefault(chunk.tensor, set()).add(chunk)
        self._first = min(self._first, self._numbers[chunk.tensor])

    def _check_deadlines(self, source: _Source, now_s: float) -> None:
        if now_s < self._deadline_s(source):
            return
        is_silent = now_s >= source.last_heard_s + self.settings.silence_s
        late = [
            chunk
            for chunk in source.owes.values()
            if chunk.checked_from != source.id
            and (is_silent or now_s >= chunk.asked_of[source.id] + self.settings.chunk_deadline_s)
        ]
        source.faults[Fault.LATE] += 1
        source.has_erred = True
        source.last_heard_s = now_s
        for chunk in late:
            self._settle(source, chunk)
            self._repool_if_idle(chunk)
        if source.faults[Fault.LATE] > self.settings.stalls_allowed:
            self._dismiss(source, Fault.LATE)

    def _deadline_s(self, source: _Source) -> float:
        """When a source has stalled if it says nothing, or its oldest chunk is late. The outside has time-outs of its own."""
        if source.id == OUTSIDE:
            return math.inf
        for chunk in source.owes.values():  # the oldest first
            if chunk.checked_from != source.id:
                late_s = chunk.asked_of[source.id] + self.settings.chunk_deadline_s
                return min(late_s, source.last_heard_s + self.settings.silence_s)
        return math.inf

    def _dismiss(self, source: _Source, reason: str) -> None:
        source.gone = reason
        self._leaving.append(Leave(source.id, reason))
        for chunk in list(source.owes.values()):
            self._settle(source, chunk)
            self._repool_if_idle(chunk)

    def _live(self, source: bytes) -> _Source | None:
        known = self._sources.get(source)
        return known if known is not None and known.gone is None else None

    def _live_sources(self) -> list[_Source]:
        return [source for source in self._sources.values() if source.gone is None]


def _can_any_give(sources: list[_Source], chunk: _Chunk) -> bool:
    return any(chunk.tensor in source.tensors and source.id not in chunk.lied_about_by for source in sources)
