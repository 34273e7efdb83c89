"""Engines one after the other, with hidden states handed over as float32: a model cut into shards, as one thing."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.core.layers import LayerRange
from potluck.engine.factory import build_engine
from potluck.engine.shard_engine import EngineSettings, ShardEngine, Step
from potluck.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]


class Trace(NamedTuple):
    """What some tokens gave: hidden states out of the last layer, and logits."""

    hidden: Floats
    logits: Floats


def shard_of(checkpoint: Checkpoint, start: int = 0, stop: int | None = None, **settings: object) -> ShardEngine:
    """Layers start ≤ layer < stop with whatever ends of the model belong to them."""
    last = checkpoint.facts.layer_count
    stop = last if stop is None else stop
    values: dict[str, object] = {"has_embedding": start == 0, "has_output": stop == last, **settings}
    return build_engine(checkpoint, EngineSettings(layers=LayerRange(start, stop), **values))  # type: ignore[arg-type]


class Pipeline:
    """`open / forward / truncate / fork / close` over all shards; a session is one number per shard."""

    def __init__(self, engines: Sequence[ShardEngine]) -> None:
        self.engines = list(engines)

    def open(self, positions: int) -> tuple[int, ...]:
        return tuple(engine.open(positions) for engine in self.engines)

    def fork(self, session: tuple[int, ...], positions: int) -> tuple[int, ...]:
        return tuple(engine.fork(part, positions) for engine, part in zip(self.engines, session, strict=True))

    def truncate(self, session: tuple[int, ...], length: int) -> None:
        for engine, part in zip(self.engines, session, strict=True):
            engine.truncate(part, length)

    def close_session(self, session: tuple[int, ...]) -> None:
        for engine, part in zip(self.engines, session, strict=True):
            engine.close_session(part)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def length(self, session: tuple[int, ...]) -> int:
        return self.engines[0].length(session[0])

    def forward(self, batch: Sequence[tuple[tuple[int, ...], Sequence[int]]]) -> list[Trace]:
        """Some tokens of some sessions through all shards; logits for each of them."""
        hidden: list[Floats | None] = [None] * len(batch)
        for place, engine in enumerate(self.engines):
            is_first, is_last = place == 0, place == len(self.engines) - 1
            steps = [
                Step(
                    session[place],
                    engine.length(session[place]),
                    tokens=list(tokens) if is_first else None,
                    hidden=rows,
                    logits=range(len(tokens)) if is_last else (),
                )
                for (session, tokens), rows in zip(batch, hidden, strict=True)
            ]
            results = engine.forward(steps)
            hidden = [result.hidden for result in results]
        return [Trace(result.hidden, result.logits) for result in results]  # type: ignore[arg-type]

    def run(self, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> Trace:
        """A whole sequence in a session of its own, cut into chunks."""
        session = self.open(len(tokens))
        traces, first = [], 0
        for count in chunks or [len(tokens)]:
            traces += self.forward([(session, tokens[first : first + count])])
            first += count
        assert first == len(tokens)
        self.close_session(session)
        return Trace(*(np.concatenate(parts) for parts in zip(*traces, strict=True)))


def pipeline_of(checkpoint: Checkpoint, cuts: Sequence[int] = (), **settings: object) -> Pipeline:
    """The whole model, cut before each of the layers `cuts`."""
    edges = [0, *cuts, checkpoint.facts.layer_count]
    return Pipeline([shard_of(checkpoint, a, b, **settings) for a, b in itertools.pairwise(edges)])
