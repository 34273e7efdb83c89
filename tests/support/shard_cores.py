"""A shard's core driven by hand: what it was told, what it wants done. Nothing here knows a socket, a worker or a clock."""

import msgspec

from potluck.core.sampling_params import SamplingParams
from potluck.shard.core import Effect, ShardCore, Work
from potluck.shard.foresight import ForeseenAnswer, ForeseenArrival
from potluck.shard.settings import ShardSettings
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Boundary,
    Close,
    Credit,
    Fault,
    Hop,
    Message,
    Neighbour,
    Open,
    Opened,
    Probe,
    Probed,
    Refused,
    Replay,
    Result,
    Rewire,
    Rewired,
    Sampler,
    ShardLost,
    Stage,
    Step,
    Truncate,
    Wiring,
)
from potluck.wire.spent import SPENT_BYTES
from potluck.wire.work import BatchDone, FromWorker, Loaded, RunBatch, SessionOpened, ToWorker, WorkOutput

ROW_BYTES = 8
LAYERS = 8
HEAD, SHARD, BEFORE, AFTER, STRANGER, OTHER_HEAD = (bytes([number]) * 32 for number in range(1, 7))
FIRST, MIDDLE, LAST, WHOLE = Stage(0, 3, True), Stage(3, 6), Stage(6, LAYERS, False, True), Stage(0, LAYERS, True, True)


def _is_as_foreseen(foreseen: ForeseenArrival, message: Message, body: bytes) -> bool:
    spent = getattr(message, "spent", b"")
    is_so_long = (len(spent), len(body)) == (foreseen.stages * SPENT_BYTES, foreseen.body_bytes)
    return is_so_long and message == msgspec.structs.replace(foreseen.step, spent=spent)


def session_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


BEHIND, AHEAD = Neighbour(BEFORE, session_id(1000)), Neighbour(AFTER, session_id(1001))


def settings_of(stage: Stage, **changes: object) -> ShardSettings:
    values: dict[str, object] = {
        "model": "m", "weights_sha256": "a" * 64, "arithmetic": 1, "layer_count": LAYERS, "hidden_size": 1, "stage": stage,
    }  # fmt: skip
    return ShardSettings(**values | changes)  # type: ignore[arg-type]


def sampler_of(prompt: int = 4, limit: int = 20, eos: tuple[int, ...] = (99,)) -> Sampler:
    return Sampler(SamplingParams(), 0, prompt, tuple(range(prompt)), eos, limit)


def wiring_of(stage: Stage, *, forward_from: int = 0, ring: bool = False, stages: int = 3, session: int = 1) -> Wiring:
    """Three shards on three nodes; the ring closes between BEFORE and AFTER (or on SHARD's `session`, for the whole model)."""
    is_whole = stage.has_embedding and stage.has_output
    return Wiring(
        None if stage.has_embedding else BEHIND,
        None if stage.has_output else Hop(AFTER, "after:1", session_id(1001)),
        Hop(SHARD if is_whole else BEFORE, "", session_id(session if is_whole else 1000))
        if ring and stage.has_output
        else None,
        (Neighbour(SHARD, session_id(session)) if is_whole else AHEAD) if ring and stage.has_embedding else None,
        forward_from,
        stages,
    )


def opening(stage: Stage, session: int = 1, /, **changes: object) -> Open:
    message = Open(
        session_id(session),
        0,
        "m",
        "a" * 64,
        1,
        stage,
        32,
        wiring_of(stage),
        (),
        sampler_of() if stage.has_output else None,
        True,
    )
    return msgspec.structs.replace(message, **changes)


class CoreBench:
    """One core. `tell` hands it a message; what it wants done lies in `sent` and `work` until the next call."""

    def __init__(self, stage: Stage, *, is_loaded: bool = True, **changes: object) -> None:
        self.stage = stage
        self.core = ShardCore(SHARD, settings_of(stage, **changes), lambda codec, rows, width: ROW_BYTES * rows)
        self.now_s = 0.0
        self.worker_idle_us = 0
        self.sent: list[SendTo] = []
        self.work: list[Work] = []
        self.foreseen = 0  # effects that were, and are what was
        if is_loaded:
            self.core.load()
            self.hear(Loaded(stage, 0, 0, 1000))
            self.take()

    def take(self) -> None:
        effects = self.core.take_effects()
        self.sent = [effect for effect in effects if isinstance(effect, SendTo)]
        self.work = [effect for effect in effects if isinstance(effect, Work)]

    def tell(self, sender: bytes, message: Message, body: bytes = b"") -> list[SendTo]:
        foreseen = self.core.foresight.next()
        self.core.on_message(sender, message, body, self.now_s, self.worker_idle_us)
        self.core.start_batch()
        if (
            isinstance(foreseen, ForeseenArrival)
            and sender == foreseen.sender
            and _is_as_foreseen(foreseen, message, body)
        ):
            self._check(foreseen.decision(body))
        self.take()
        return self.sent

    def hear(self, message: FromWorker, body: bytes = b"") -> list[SendTo]:
        foreseen = self.core.foresight.next()
        self.core.on_worker_message(message, body, self.now_s)
        if isinstance(foreseen, ForeseenAnswer) and isinstance(message, BatchDone):
            numbers = foreseen.numbers(message, body, self.now_s)
            if numbers is not None:
                self._check(foreseen.decision(*numbers))
        self.take()
        return self.sent

    def _check(self, foreseen: Effect) -> None:
        assert self.core._effects.items[0] == foreseen, "it decides otherwise than it has foreseen"
        self.foreseen += 1

    def lose_node(self, node: bytes) -> list[SendTo]:
        self.core.on_node_lost(node, self.now_s)
        self.take()
        return self.sent

    def lose_worker(self) -> list[SendTo]:
        self.core.on_worker_lost("killed")
        self.take()
        return self.sent

    def open(self, session: int = 1, head: bytes = HEAD, **changes: object) -> None:
        message = opening(self.stage, session, **changes)
        self.tell(head, message)
        self.hear(SessionOpened(message.session))

    @property
    def messages(self) -> list[Message]:
        return [effect.message for effect in self.sent]

    @property
    def orders(self) -> list[ToWorker]:
        return [work.message for work in self.work]

    @property
    def batches(self) -> list[RunBatch]:
        return [order for order in self.orders if isinstance(order, RunBatch)]

    @property
    def batch(self) -> RunBatch:
        [batch] = self.batches
        return batch

    def step(
        self, position: int, count: int = 1, /, *, session: int = 1, sender: bytes | None = None, **changes: object
    ) -> list[SendTo]:
        """A step that fits, apart from the changes, from whoever should send it."""
        codec = None if self.stage.has_embedding else "fp32"
        source = None if self.stage.has_embedding else BEHIND.session
        message = Step(session_id(session), 0, position, count, self.stage.start, codec, True, source=source)
        message = msgspec.structs.replace(message, **changes)
        body = bytes((4 if self.stage.has_embedding else ROW_BYTES) * count)
        return self.tell(sender or (HEAD if self.stage.has_embedding else BEFORE), message, body)

    def done(self, batch: RunBatch, token: int | None = 7, code: str = "", text: str = "") -> list[SendTo]:
        """The worker's answer to a batch: rows of the wanted size, tokens where some are to be chosen."""
        outputs, bodies = [], []
        for item in batch.items:
            body = bytes(ROW_BYTES * item.count) if item.output_codec is not None and not code else b""
            chosen = token if item.chooses and not code else None
            outputs.append(WorkOutput(item.session, len(body), chosen, None, (), code, text))
            bodies.append(body)
        return self.hear(BatchDone(batch.batch, tuple(outputs), 500), b"".join(bodies))

    def run(self, position: int, count: int = 1, /, **changes: object) -> list[SendTo]:
        """A step, and what it leads to once the worker is done."""
        self.step(position, count, **changes)
        return self.done(self.batch)


def boundary(layer: int, codec: str) -> Boundary:
    return Boundary(layer, codec)  # type: ignore[arg-type]


def every_message(session: bytes) -> list[tuple[Message, bytes]]:
    """Everything that names a session, each as it would be valid from whoever may send it."""
    wiring = wiring_of(MIDDLE)
    return [
        (opening(MIDDLE, int.from_bytes(session, "big")), b""),
        (Opened(session, 0), b""),
        (Refused(session, 0, "bad_request", ""), b""),
        (Step(session, 0, 5, 1, 3, "fp32", True, source=BEHIND.session), bytes(ROW_BYTES)),
        (Result(session, 0, 5, 3), b""),
        (Rewire(session, 1, 0, wiring), b""),
        (Rewired(session, 1, 0, 0), b""),
        (Replay(session, 0, 0, 5), b""),
        (Truncate(session, 0, 0), b""),
        (Credit(session, 0, 5), b""),
        (Close(session), b""),
        (ShardLost(session, STRANGER, "m", MIDDLE, "gone"), b""),
        (Probe(session, 3), b""),
        (Probed(session, 3, True, 0, 0, 0), b""),
        (Fault(session, 0, "x", "y", None), b""),
    ]
