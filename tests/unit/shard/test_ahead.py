"""What was foreseen leaves at once and is decided afterwards; nothing leaves that holds no more. Links and worker are lists here."""

from collections.abc import Callable

from potluck.shard.ahead import Ahead
from potluck.shard.effects import Effect, Work
from potluck.wire.channel import Channel
from potluck.wire.effects import SendTo
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.messages import Hop, Neighbour, Probe, Rewire, Stage, Step, Wiring
from potluck.wire.work import BatchDone, SessionOpened, WorkOutput
from potluck.wire.work_frames import Buffer, to_worker_decoder
from tests.support.shard_cores import (
    AFTER,
    BEFORE,
    HEAD,
    MIDDLE,
    ROW_BYTES,
    STRANGER,
    CoreBench,
    opening,
    session_id,
)

S = session_id(1)
ROW = b"activate"


class AheadBench:
    """A core that is driven through an Ahead, as a server does. `sent` and `given`: what left before it was decided."""

    def __init__(self, stage: Stage = MIDDLE) -> None:
        self.core = CoreBench(stage).core
        self.sent: list[tuple[bytes, bytes]] = []
        self.given: list[bytes] = []
        self.contradictions = 0
        self.is_linked = self.has_worker = True
        self.expected: tuple[bytes, ForeseenStep, Callable[[bytes], None]] | None = None
        self.ahead = Ahead(self.core, self, self, self._contradicted)
        self.effects: list[Effect] = []

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        self.expected = node, step, on_arrival

    def send_foreseen(self, node: bytes, step: ForeseenStep, spent: bytes, body: bytes) -> bool:
        if self.is_linked:
            self.sent.append((node, step.frame(spent, body)))
        return self.is_linked

    def send_batch(self, start: Buffer, body: bytes) -> bool:
        if self.has_worker:
            self.given.append(bytes(start) + body)
        return self.has_worker

    def _contradicted(self) -> None:
        self.contradictions += 1

    def take(self) -> Effect | None:
        left, effects = self.ahead.take_effects()
        self.effects = list(effects)
        return left

    def begin(self) -> None:
        """One session, whose prompt has gone through."""
        self.core.on_message(HEAD, opening(self.core.settings.stage), b"", 0.0, 0)
        self.core.on_worker_message(SessionOpened(S), b"", 0.0)
        self.take()
        self.step(0, 4)
        self.done()
        self.ahead.look()

    def step(self, position: int, count: int = 1) -> Effect | None:
        neighbour = session_id(1000)
        message = Step(S, 0, position, count, 3, "fp32", True, source=neighbour)
        self.core.on_message(BEFORE, message, ROW * count, 0.0, 0)
        return self.take()

    def done(self, body: bytes = ROW) -> Effect | None:
        [number] = self.core._batches.running
        [running] = self.core._batches.running[number]
        body = body * running.step.count
        message = BatchDone(number, (WorkOutput(S, len(body), None, None, (), "", ""),), 500)
        self.ahead.on_answer(message, body, 0.5)
        self.core.on_worker_message(message, body, 0.5)
        return self.take()

    def arrives(self, body: bytes = ROW) -> None:
        assert self.expected is not None
        self.expected[2](body)


def test_a_step_is_with_the_worker_before_it_is_decided() -> None:
    bench = AheadBench()
    bench.begin()
    bench.arrives()
    [given] = bench.given
    assert bench.core.state.queue_depth == 0, "the core knows nothing of it yet"
    left = bench.step(4)
    assert isinstance(left, Work)
    [(message, body)] = to_worker_decoder().feed(given)
    assert (message, body) == (left.message, ROW)
    assert bench.effects == []
    assert bench.contradictions == 0


def test_an_output_is_on_its_way_before_it_is_decided() -> None:
    bench = AheadBench()
    bench.begin()
    bench.step(4)
    bench.ahead.look()
    left = bench.done()
    assert isinstance(left, SendTo)
    [(node, frame)] = bench.sent
    [received] = Channel().receive(frame)
    assert (node, received.message, received.body) == (AFTER, left.message, ROW)
    assert bench.effects == []


def test_what_was_not_looked_at_goes_the_usual_way() -> None:
    bench = AheadBench()
    bench.begin()
    bench.ahead.forget()
    assert bench.step(4) is None
    assert [type(effect) for effect in bench.effects] == [Work]
    assert bench.done() is None
    assert [type(effect) for effect in bench.effects] == [SendTo]
    assert (bench.given, bench.sent) == ([], [])


def test_whatever_the_core_was_told_ends_what_was_foreseen() -> None:
    bench = AheadBench()
    bench.begin()
    bench.core.on_message(HEAD, Probe(S, 1), b"", 0.0, 0)
    bench.take()
    bench.arrives()
    assert bench.given == [], "the link was told of it before"
    assert bench.step(4) is None
    assert [type(effect) for effect in bench.effects] == [Work]


def test_without_a_worker_or_a_link_nothing_leaves_early() -> None:
    bench = AheadBench()
    bench.begin()
    bench.has_worker = bench.is_linked = False
    bench.arrives()
    assert bench.step(4) is None
    assert [type(effect) for effect in bench.effects] == [Work]
    bench.ahead.look()
    assert bench.done() is None
    assert [type(effect) for effect in bench.effects] == [SendTo]


def test_a_core_that_decides_otherwise_is_noticed_and_not_obeyed_either() -> None:
    bench = AheadBench()
    bench.begin()
    bench.arrives(b"another ")
    assert bench.step(4) is None
    assert bench.contradictions == 1
    assert bench.effects == []
    assert bench.take() is None
    assert bench.contradictions == 1, "it is over"


def test_a_former_neighbours_step_is_not_the_one_that_is_expected_now() -> None:
    bench = AheadBench()
    bench.begin()
    assert bench.expected is not None
    _, _, of_before = bench.expected
    wiring = Wiring(Neighbour(STRANGER, session_id(1000)), Hop(AFTER, "", session_id(1001)), None, None, 0, 3)
    bench.core.on_message(HEAD, Rewire(S, 1, 4, wiring, None), b"", 0.0, 0)
    bench.take()
    bench.ahead.look()
    assert bench.expected[0] == STRANGER
    of_before(ROW)  # the old epoch's, on its way since before
    assert bench.given == []
    assert bench.step(4) is None
    assert bench.core.counters == {"not_a_neighbour": 1}
    assert bench.contradictions == 0


def test_a_core_that_decides_nothing_is_noticed_too() -> None:
    bench = AheadBench()
    bench.begin()
    bench.arrives()
    assert bench.take() is None
    assert bench.contradictions == 1


def test_an_arrival_is_foreseen_once_whoever_tells_of_it_again() -> None:
    bench = AheadBench()
    bench.begin()
    bench.arrives()
    bench.arrives()  # a second link of that node
    assert len(bench.given) == 1
    assert bench.step(4) is not None
    bench.arrives()
    assert len(bench.given) == 1
    assert bench.ahead.count == 1


def test_the_link_expects_the_frame_that_the_step_will_have() -> None:
    bench = AheadBench()
    bench.begin()
    assert bench.expected is not None
    node, step, _ = bench.expected
    said = Step(S, 0, 4, 1, 3, "fp32", True, source=session_id(1000))
    assert node == BEFORE
    assert step.frame(b"", ROW) == ForeseenStep(said, 0, ROW_BYTES).frame(b"", ROW)
