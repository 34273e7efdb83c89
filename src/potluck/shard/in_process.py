"""A caller in the daemon's own process: hands a shard one message after the other and waits for what it says. No network in between."""

import asyncio
import os
from dataclasses import dataclass

from potluck.core.errors import ShardUnavailable
from potluck.shard.settings import ShardSettings
from potluck.wire.effects import SendTo
from potluck.wire.messages import Codec, Fault, Message, Open, Refused, Stage, Step, Wiring


@dataclass(frozen=True)
class TensorChunk:
    """Some consecutive positions: float32 rows, or int32 token ids where they go into a shard with the embedding."""

    count: int
    data: bytes


class InProcessCaller:
    """The head of one session on one shard, under an id of its own, so that nobody else can speak for it."""

    def __init__(self, settings: ShardSettings, positions: int) -> None:
        self.id, self.session = os.urandom(32), os.urandom(16)
        mine = settings.stage
        self._stage = Stage(
            mine.start, mine.stop, mine.has_embedding
        )  # activations leave it, also where it has the output
        self._codec: Codec | None = None if mine.has_embedding else "fp32"
        self._position = 0
        self._answers: asyncio.Queue[SendTo] = asyncio.Queue()  # at most one is under way
        self.opening = Open(
            self.session, 0, settings.model, settings.weights_sha256, settings.arithmetic, self._stage, positions,
            Wiring(None, None, None, None, 0, 1), keeps_outbox=False,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<InProcessCaller {self.session.hex()[:8]} at {self._position}>"

    def next_step(self, count: int) -> Step:
        step = Step(self.session, 0, self._position, count, self._stage.start, self._codec, False)
        self._position += count
        return step

    def hear(self, effect: SendTo) -> None:
        self._answers.put_nowait(effect)

    async def answer(self) -> tuple[Message, bytes]:
        """What the shard says next. Raises ShardUnavailable where it refuses, or has lost its worker."""
        effect = await self._answers.get()
        if isinstance(effect.message, Refused | Fault):
            raise ShardUnavailable(f"{effect.message.code}: {effect.message.message}")
        return effect.message, effect.body
