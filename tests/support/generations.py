"""A generation driven by hand: shards that say exactly what a test lets them say, and a clock that the test moves."""

import itertools
from collections.abc import Sequence

from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.frames import StreamFrame
from potluck.orchestrator.generation import Generation, GenerationRequest, GenerationSettings
from potluck.planner.cover import Candidate, Placed, greedy_cover
from potluck.planner.route import quickest_replacements
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Close,
    Fault,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    Refused,
    Result,
    Rewire,
    Rewired,
    Stage,
)

LAYERS = 8
HEAD = b"H" * 32
Offer = tuple[int, int, int]  # node, first layer, last layer (inclusive)
THREE: tuple[Offer, ...] = ((1, 0, 2), (2, 3, 5), (3, 6, 7))
SPARES: tuple[Offer, ...] = ((11, 0, 2), (12, 3, 5), (13, 6, 7))


def node(number: int) -> bytes:
    return bytes([number]) * 32


def candidate(offer: Offer, queue_depth: int = 0) -> Candidate:
    number, lo, hi = offer
    return Candidate(node(number), f"node:{number}", Stage(lo, hi + 1, lo == 0, hi == LAYERS - 1), queue_depth)


class HeadBench:
    """`sent` has everything since the last look, `frames` all frames; answers come from whoever `reachable` says."""

    def __init__(
        self, offers: Sequence[Offer] = THREE, spares: Sequence[Offer] = SPARES, *, prompt: int = 4, max_tokens: int = 20,
        eos: tuple[int, ...] = (99,), asked: dict[str, object] | None = None, **settings: object,
    ) -> None:  # fmt: skip
        values: dict[str, object] = {"prefill_chunk": 2, "prefill_window": 2, "uses_ring": False}
        request = GenerationRequest(
            model="m", weights_sha256="a" * 64, arithmetic=1, layer_count=LAYERS, prompt=tuple(range(prompt)),
            max_tokens=max_tokens, params=SamplingParams(), eos=eos, vocabulary_size=1000, **asked or {},  # type: ignore[arg-type]
        )  # fmt: skip
        self.candidates = [candidate(offer) for offer in offers] + [candidate(offer, 1) for offer in spares]
        self.unreachable: set[bytes] = set()
        self.local: list[Candidate] = []
        pipeline = greedy_cover(self.candidates, Stage(0, LAYERS, True, True))
        assert pipeline is not None
        ids = itertools.count(1)
        self.generation = Generation(
            request, pipeline, self._repick, GenerationSettings(**values | settings),  # type: ignore[arg-type]
            lambda: next(ids).to_bytes(16, "big"), HEAD,
        )  # fmt: skip
        self.now_s = 0.0
        self.sent: list[SendTo] = []
        self.frames: list[StreamFrame] = []

    def _repick(
        self, kept: Sequence[Placed | None], excluded: frozenset[bytes], allows_local: bool
    ) -> list[list[Placed]] | None:
        offered = [*self.candidates, *(self.local if allows_local else [])]
        return quickest_replacements(kept, [c for c in offered if c.node not in self.unreachable], excluded, LAYERS)

    def _take(self) -> list[SendTo]:
        self.sent = self.generation.take_effects()
        self.frames += self.generation.take_frames()
        return self.sent

    # ------------------------------------------------------------ what happens

    def start(self) -> list[SendTo]:
        self.generation.start(self.now_s)
        return self._take()

    def tell(self, sender: bytes, message: Message) -> list[SendTo]:
        self.generation.on_message(sender, message, self.now_s)
        return self._take()

    def lose(self, number: int) -> list[SendTo]:
        self.unreachable.add(node(number))
        self.generation.on_lost(node(number), "reset", self.now_s)
        return self._take()

    def read(self, count: int) -> list[SendTo]:
        self.generation.consumed(count, self.now_s)
        return self._take()

    def wake(self, now_s: float) -> list[SendTo]:
        self.now_s = now_s
        self.generation.on_time(now_s)
        return self._take()

    def cancel(self) -> list[SendTo]:
        self.generation.cancel()
        return self._take()

    # ------------------------------------------------------------ what shards say

    def answer_all(self, lengths: dict[int, int] | None = None, dropped: Sequence[int] = ()) -> list[SendTo]:
        """OPENED and REWIRED to everything asked just now; `lengths` of nodes that have less, `dropped` those without outbox."""
        sent: list[SendTo] = []
        for effect in list(self.sent):
            message, number = effect.message, effect.node[0]
            if isinstance(message, Open):
                sent += self.tell(effect.node, Opened(message.session, message.epoch))
            elif isinstance(message, Rewire):
                length = min(message.length, (lengths or {}).get(number, message.length))
                outbox_from = length if number in dropped else 0
                sent += self.tell(effect.node, Rewired(message.session, message.epoch, length, outbox_from))
        self.sent = sent
        return sent

    def run(self) -> list[SendTo]:
        """From the start to the first steps."""
        self.start()
        return self.answer_all()

    def result(self, position: int, token: int | None = None, *, epoch: int | None = None) -> list[SendTo]:
        epoch = self.generation.epoch if epoch is None else epoch
        return self.tell(self.generation.stages[-1].node, Result(self.generation.sessions[-1], epoch, position, token))

    def prefill(self) -> list[SendTo]:
        """Every chunk of the prompt, and the first token, which is 100."""
        prompt = len(self.generation.request.prompt)
        for stop in range(2, prompt, 2):
            self.result(stop)
        return self.result(prompt, 100)

    def tokens(self, count: int) -> list[SendTo]:
        """`count` more tokens, each read at once: 100 + position."""
        for _ in range(count):
            position = len(self.generation.tokens)
            self.result(position, 100 + position)
            sent = self.sent
            self.read(1)
            self.sent = sent + self.sent
        return self.sent

    def fault(self, stage: int, code: str, culprit: int | bytes | None, epoch: int | None = None) -> list[SendTo]:
        epoch = self.generation.epoch if epoch is None else epoch
        name = node(culprit) if isinstance(culprit, int) else culprit
        where = self.generation.stages[stage].node
        return self.tell(where, Fault(self.generation.sessions[stage], epoch, code, "words", name))

    def refuse(self, stage: int, code: str = "shard_unavailable") -> list[SendTo]:
        where = self.generation.stages[stage].node
        return self.tell(where, Refused(self.generation.sessions[stage], self.generation.epoch, code, "words"))

    def probed(self, **positions: tuple[int, int]) -> list[SendTo]:
        """Everybody answers the probes in `sent`; `n1=(in, out)` by node, equal to the journal where not given."""
        done = len(self.generation.tokens) - 1
        sent: list[SendTo] = []
        for effect in list(self.sent):
            if isinstance(effect.message, Probe):
                position_in, position_out = positions.get(f"n{effect.node[0]}", (done, done))
                answer = Probed(effect.message.session, effect.message.nonce, True, 0, position_in, position_out)
                sent += self.tell(effect.node, answer)
        self.sent = sent
        return sent

    # ------------------------------------------------------------ what it wants

    def of(self, kind: type[Message]) -> list[tuple[int, Message]]:
        """Messages of a kind in `sent`, with the number of the node that each goes to."""
        return [(effect.node[0], effect.message) for effect in self.sent if isinstance(effect.message, kind)]

    def to(self, kind: type[Message]) -> list[int]:
        return [number for number, _ in self.of(kind)]

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """The pipeline: node, first and last layer."""
        return [(p.node[0], p.stage.start, p.stage.stop - 1) for p in self.generation.stages]

    @property
    def closed(self) -> list[int]:
        return self.to(Close)

    def kinds(self, kind: type[StreamFrame]) -> list[StreamFrame]:
        return [frame for frame in self.frames if isinstance(frame, kind)]
