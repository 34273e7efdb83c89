"""Who is asked for which chunk: sharing, demotion, stalls, stealing, the outside, and that it always comes to an end."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.weights.peer_fetch import OUTSIDE, Ask, Fault, FetchSettings, Leave, PeerFetch
from potluck.weights.units import MissingChunk

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
MIB = 1 << 20


def chunks(tensors: int = 2, each: int = 4) -> list[MissingChunk]:
    return [MissingChunk(f"t{t}", n, MIB) for t in range(tensors) for n in range(each)]


def names(tensors: int = 2) -> list[str]:
    return [f"t{t}" for t in range(tensors)]


def asks_of(actions: list[Ask | Leave]) -> list[Ask]:
    return [action for action in actions if isinstance(action, Ask)]


def deliver(fetch: PeerFetch, ask: Ask, is_right: bool = True, now_s: float = 0.0) -> None:
    assert fetch.on_arrived(ask.source, ask.tensor, ask.chunk, now_s)
    fetch.on_checked(ask.source, ask.tensor, ask.chunk, is_right)


def test_sources_share_the_work_and_no_chunk_is_asked_twice() -> None:
    fetch = PeerFetch(chunks(4, 4))
    for source in (A, B):
        fetch.add_source(source, names(4), 0.0)
    asks = asks_of(fetch.advance(0.0))
    assert len(asks) == len({(ask.tensor, ask.chunk) for ask in asks}) == 16
    assert Counter(ask.source for ask in asks) == {A: 8, B: 8}
    assert [ask.tensor for ask in asks] == sorted(ask.tensor for ask in asks)  # in order, so that layers become whole


def test_a_source_is_asked_for_a_window_and_for_more_when_chunks_were_checked() -> None:
    fetch = PeerFetch(chunks(1, 30), FetchSettings(window_bytes=4 * MIB))
    fetch.add_source(A, names(1), 0.0)
    first = asks_of(fetch.advance(0.0))
    assert len(first) == 4
    assert fetch.on_arrived(A, first[0].tensor, first[0].chunk, 0.1)
    assert asks_of(fetch.advance(0.1)) == []  # its bytes are still in memory
    fetch.on_checked(A, first[0].tensor, first[0].chunk, True)
    assert len(asks_of(fetch.advance(0.2))) == 1
    assert fetch.done_bytes == MIB


def test_a_wrong_chunk_is_asked_elsewhere_and_its_source_only_when_nobody_better_has_it() -> None:
    fetch = PeerFetch(chunks(1, 4))
    fetch.add_source(A, names(1), 0.0)
    [lie, *others] = asks_of(fetch.advance(0.0))
    fetch.add_source(B, names(1), 0.0)
    deliver(fetch, lie, is_right=False)
    again = asks_of(fetch.advance(0.1))
    assert again == [Ask(B, lie.tensor, lie.chunk)]
    for ask in (*others, *again):
        deliver(fetch, ask)
    assert fetch.is_done
    assert {r.source: r.faults for r in fetch.report()} == {A: {"wrong_bytes": 1}, B: {}}


def test_a_source_that_lies_twice_is_left_for_good() -> None:
    fetch = PeerFetch(chunks(1, 4))
    fetch.add_source(A, names(1), 0.0)
    first, second, *_ = asks_of(fetch.advance(0.0))
    deliver(fetch, first, is_right=False)
    deliver(fetch, second, is_right=False)
    assert Leave(A, Fault.WRONG) in fetch.advance(0.1)
    fetch.add_source(A, names(1), 0.2)  # it comes back, and is still not believed
    assert fetch.advance(0.2) == []
    assert fetch.is_stuck(0.2)
    fetch.add_source(B, names(1), 0.3)
    for ask in asks_of(fetch.advance(0.3)):
        assert ask.source == B
        deliver(fetch, ask)
    assert fetch.is_done


def test_what_nobody_asked_for_is_not_even_looked_at() -> None:
    fetch = PeerFetch(chunks(1, 2), FetchSettings(window_bytes=MIB))
    fetch.add_source(A, names(1), 0.0)
    [ask] = asks_of(fetch.advance(0.0))
    assert not fetch.on_arrived(B, ask.tensor, ask.chunk, 0.0)
    assert not fetch.on_arrived(A, ask.tensor, 1 - ask.chunk, 0.0)
    assert not fetch.on_arrived(A, "t9", 0, 0.0)
    assert fetch.done_bytes == 0


def test_a_silent_source_loses_its_chunks_and_in_the_end_its_place() -> None:
    fetch = PeerFetch(chunks(1, 2))
    fetch.add_source(A, names(1), 0.0)
    fetch.advance(0.0)
    now = 0.0
    while (wake := fetch.next_wake_s(now)) is not None:
        assert now < wake < 60.0
        now = wake
        fetch.advance(now)
    assert fetch.is_stuck(now)
    [report] = fetch.report()
    assert report.gone == Fault.LATE
    assert fetch.missing_tensors == ("t0",)


def test_a_slow_source_that_keeps_talking_is_not_late() -> None:
    fetch = PeerFetch(chunks(1, 8), FetchSettings(silence_s=10.0, chunk_deadline_s=1000.0))
    fetch.add_source(A, names(1), 0.0)
    for number, ask in enumerate(asks_of(fetch.advance(0.0))):
        now = 9.0 * (number + 1)
        assert fetch.advance(now) == []
        deliver(fetch, ask, now_s=now)
    assert fetch.is_done
    assert fetch.report()[0].faults == {}


def test_an_idle_source_takes_over_what_a_slow_one_owes_and_the_second_copy_is_ignored() -> None:
    fetch = PeerFetch(chunks(1, 2), FetchSettings(steal_after_s=0.5))
    fetch.add_source(A, names(1), 0.0)
    asks = asks_of(fetch.advance(0.0))
    fetch.add_source(B, names(1), 0.0)
    assert asks_of(fetch.advance(0.1)) == []
    assert fetch.next_wake_s(0.1) == 0.5
    [stolen] = asks_of(fetch.advance(0.5))
    assert stolen == Ask(B, asks[0].tensor, asks[0].chunk)
    deliver(fetch, stolen)
    assert not fetch.on_arrived(A, asks[0].tensor, asks[0].chunk, 0.6)
    assert fetch.duplicates == 1
    deliver(fetch, asks[1])
    assert fetch.is_done


def test_the_outside_is_asked_only_for_what_no_peer_has() -> None:
    fetch = PeerFetch(chunks(2, 2))
    fetch.add_source(OUTSIDE, names(2), 0.0)
    fetch.add_source(A, ["t1"], 0.0)
    asks = asks_of(fetch.advance(0.0))
    assert {ask.tensor for ask in asks if ask.source == OUTSIDE} == {"t0"}
    assert {ask.tensor for ask in asks if ask.source == A} == {"t1"}
    fetch.lose_source(A)
    assert {ask.tensor for ask in asks_of(fetch.advance(0.1))} == {"t1"}


def test_a_source_that_refuses_is_left_in_peace_for_a_moment_and_one_that_lacks_a_tensor_is_not_asked_for_it() -> None:
    fetch = PeerFetch(chunks(2, 1), FetchSettings(refusal_pause_s=0.25))
    fetch.add_source(A, names(2), 0.0)
    busy, lacking = asks_of(fetch.advance(0.0))
    fetch.on_refused(A, lacking.tensor, lacking.chunk, is_held=False, now_s=0.0)
    fetch.on_refused(A, busy.tensor, busy.chunk, is_held=True, now_s=0.0)
    assert fetch.advance(0.1) == []
    assert not fetch.is_stuck(0.1)
    assert fetch.next_wake_s(0.1) == 0.25
    assert asks_of(fetch.advance(0.25)) == [busy]


@dataclass
class Behaviour:
    """How a simulated source answers; `lie`, `stall`, `lose` and `refuse` are chances in percent."""

    tensors: set[str]
    lie: int = 0
    stall: int = 0
    lose: int = 0
    refuse: int = 0
    delay_s: float = 0.01

    @property
    def is_sound(self) -> bool:
        return not (self.lie or self.stall or self.lose or self.refuse)


@dataclass
class World:
    """Carries out what a fetch wants, on a clock of its own."""

    fetch: PeerFetch
    sources: dict[bytes, Behaviour]
    draw: "st.DataObject"
    now_s: float = 0.0
    under_way: list[tuple[float, Ask]] = field(default_factory=list)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)

    def run(self) -> None:
        for source, behaviour in self.sources.items():
            self.fetch.add_source(source, behaviour.tensors, 0.0)
        for _ in range(5000):
            for action in self.fetch.advance(self.now_s):
                if isinstance(action, Ask) and not self._percent(self.sources[action.source].stall):
                    self.under_way.append((self.now_s + self.sources[action.source].delay_s, action))
            if self.fetch.is_done or self.fetch.is_stuck(self.now_s):
                return
            self._next_event()
        raise AssertionError(f"no end: {self.fetch!r}")

    def _next_event(self) -> None:
        wake_s = self.fetch.next_wake_s(self.now_s)
        self.under_way.sort(key=lambda pair: pair[0])
        if not self.under_way or (wake_s is not None and wake_s < self.under_way[0][0]):
            assert wake_s is not None, "nothing will ever happen"
            self.now_s = wake_s
            return
        self.now_s, ask = self.under_way.pop(0)
        self._answer(ask, self.sources[ask.source])

    def _answer(self, ask: Ask, behaviour: Behaviour) -> None:
        if self._percent(behaviour.lose):
            return self.fetch.lose_source(ask.source)
        if self._percent(behaviour.refuse):
            is_held = self.draw.draw(st.booleans())
            return self.fetch.on_refused(ask.source, ask.tensor, ask.chunk, is_held, self.now_s)
        is_right = not self._percent(behaviour.lie)
        if self.fetch.on_arrived(ask.source, ask.tensor, ask.chunk, self.now_s):
            before = self.fetch.done_bytes
            self.fetch.on_checked(ask.source, ask.tensor, ask.chunk, is_right)
            assert (self.fetch.done_bytes > before) == is_right
            self.accepted[ask.tensor, ask.chunk] += is_right
        return None

    def _percent(self, chance: int) -> bool:
        return chance > 0 and self.draw.draw(st.integers(0, 99)) < chance


chances = st.sampled_from([0, 0, 0, 10, 50, 100])
behaviours = st.builds(
    Behaviour,
    tensors=st.sets(st.sampled_from(names(3)), min_size=1),
    lie=chances,
    stall=chances,
    lose=chances,
    refuse=chances,
    delay_s=st.sampled_from([0.001, 0.3, 4.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(behaviours, min_size=1, max_size=6), st.integers(1, 6), st.data())
def test_it_always_ends_takes_every_chunk_once_and_succeeds_where_sound_sources_have_all(
    crowd: list[Behaviour], each: int, draw: "st.DataObject"
) -> None:
    fetch = PeerFetch(chunks(3, each), FetchSettings(window_bytes=2 * MIB))
    world = World(fetch, {bytes([number + 1]) * 32: behaviour for number, behaviour in enumerate(crowd)}, draw)
    world.run()
    sound = set().union(*(behaviour.tensors for behaviour in crowd if behaviour.is_sound))
    assert set(world.accepted.values()) <= {0, 1}
    assert fetch.done_bytes == sum(world.accepted.values()) * MIB
    assert fetch.is_done == (sum(world.accepted.values()) == 3 * each)
    assert not set(fetch.missing_tensors) & sound
