"""Real worker processes on a tiny random model, spoken to as a daemon would, one answer at a time."""

import asyncio
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.bench.random_model import RandomShape, random_model
from potluck.core.layers import LayerRange
from potluck.engine.cpu_engine import CpuEngine, EngineSettings
from potluck.shard.worker_process import WorkerProcess
from potluck.weights.open_model import open_checkpoint
from potluck.wire.messages import Boundary, Codec, Sampler, Stage
from potluck.wire.work import BatchDone, FromWorker, Load, OpenSession, RunBatch, ToWorker, WorkItem, WorkOutput
from potluck.wire.worker_settings import WorkerSettings

SHAPE = RandomShape(
    name="tiny", hidden_size=64, layer_count=4, head_count=4, kv_head_count=2, head_size=16, feed_forward_size=128,
    vocabulary_size=512, context_length=256,
)  # fmt: skip
WHOLE = Stage(0, 4, True, True)
FIRST, SECOND = Stage(0, 2, True, False), Stage(2, 4, False, True)
MIDDLE = Stage(1, 3)
_PATIENCE_S = 180.0  # a first start compiles kernels


def tiny_settings(folder: Path, **changes: object) -> WorkerSettings:
    path = random_model(folder, SHAPE, "Q4_0", lambda _: None)
    values: dict[str, object] = {"model_path": str(path), "source": "tiny", "packed_folder": str(folder / "packed")}
    return WorkerSettings(**values | changes)  # type: ignore[arg-type]


def tiny_engine(settings: WorkerSettings, stage: Stage = WHOLE) -> CpuEngine:
    """The same stage in this process."""
    layers = LayerRange(stage.start, stage.stop) if stage.stop > stage.start else None
    engine_settings = EngineSettings(
        layers=layers, has_embedding=stage.has_embedding, has_output=stage.has_output, source="tiny",
        cache_folder=Path(settings.packed_folder or ""),
    )  # fmt: skip
    return CpuEngine(open_checkpoint(Path(settings.model_path)), engine_settings)


class Part(NamedTuple):
    """One item of a batch: token ids, or activations in a codec."""

    session: bytes
    position: int
    count: int
    data: bytes
    codec: Codec | None = None
    output: Codec | None = None
    chooses: bool = False


def tokens_part(session: bytes, position: int, tokens: Sequence[int], **rest: object) -> Part:
    return Part(session, position, len(tokens), struct.pack(f"<{len(tokens)}i", *tokens), **rest)  # type: ignore[arg-type]


class WorkerClient:
    """`lost` is a future with the reason and the loop's time."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[tuple[str, float]] = asyncio.get_running_loop().create_future()
        self.messages: asyncio.Queue[tuple[FromWorker, bytes]] = asyncio.Queue()
        self.process: WorkerProcess
        self._batch = 0

    @classmethod
    async def start(cls, settings: WorkerSettings, *stages: Stage) -> "WorkerClient":
        client = cls()
        client.process = await WorkerProcess.start(settings, client.on_message, client.on_lost)
        for stage in stages:
            await client.ask(Load(stage))
        return client

    def on_message(self, message: FromWorker, body: bytes) -> None:
        self.messages.put_nowait((message, body))

    def on_lost(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result((reason, asyncio.get_running_loop().time()))

    async def ask(self, message: ToWorker, *parts: bytes) -> FromWorker:
        self.process.send(message, *parts)
        return (await self.answer())[0]

    async def answer(self) -> tuple[FromWorker, bytes]:
        return await asyncio.wait_for(self.messages.get(), _PATIENCE_S)

    async def open(
        self, session: bytes, stage: Stage, positions: int = 64, boundaries: tuple[Boundary, ...] = (),
        sampler: Sampler | None = None,
    ) -> FromWorker:  # fmt: skip
        return await self.ask(OpenSession(session, stage, positions, boundaries, sampler))

    async def run(self, *parts: Part) -> list[tuple[WorkOutput, bytes]]:
        """Each part's output, with its bytes."""
        self._batch += 1
        items = tuple(
            WorkItem(part.session, part.position, part.count, part.codec, part.output, part.chooses, len(part.data))
            for part in parts
        )
        self.process.send(RunBatch(self._batch, items), *[part.data for part in parts])
        done, body = await self.answer()
        assert isinstance(done, BatchDone)
        assert done.batch == self._batch
        outputs, offset = [], 0
        for output in done.outputs:
            outputs.append((output, body[offset : offset + output.size_bytes]))
            offset += output.size_bytes
        assert offset == len(body)
        return outputs

    async def stop(self) -> None:
        await self.process.stop()


def rows_of(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, np.float32).reshape(-1, SHAPE.hidden_size)
