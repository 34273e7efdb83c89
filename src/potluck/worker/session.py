"""A session in the worker: its place in an engine, the codecs at its boundaries, its sampler."""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from potluck.core.layers import LayerRange
from potluck.engine.shard_engine import Rounding, ShardEngine
from potluck.wire.codecs import decode, encode
from potluck.wire.messages import Boundary, Codec, Stage
from potluck.worker.sampler import TokenChooser

Floats = npt.NDArray[np.float32]


@dataclass
class WorkerSession:
    """`number` is the session's in `engine`. `chooser` None: no tokens are chosen here."""

    engine: ShardEngine
    number: int
    stage: Stage
    layers: LayerRange | None
    positions: int
    boundaries: tuple[Boundary, ...]  # those that lose something; a link in fp32 changes nothing
    chooser: TokenChooser | None

    def __post_init__(self) -> None:
        self.roundings = _roundings_within(self.stage, self.boundaries)
        # The session's codec for what enters this stage, where that is activations.
        self.rounds_input_as = next((each.codec for each in self.boundaries if each.layer == self.stage.start), None)

    def __repr__(self) -> str:
        return f"<WorkerSession {self.number} layers {self.layers} at {self.engine.length(self.number)} of {self.positions}>"

    def truncate(self, length: int) -> None:
        # The daemon may know of less than was computed, never of more; a step that does not fit is refused anyway.
        self.engine.truncate(self.number, min(length, self.engine.length(self.number)))
        if self.chooser is not None:
            self.chooser.truncate(length)

    def park(self, length: int) -> None:
        """Only its keys and values stay, for sessions that begin with the same tokens."""
        self.engine.park(self.number, min(length, self.engine.length(self.number)))
        self.chooser = None

    def close(self) -> None:
        self.engine.close_session(self.number)


def rounded(codec: Codec, rows: Floats) -> Floats:
    """What a link with this codec would deliver."""
    return decode(codec, encode(codec, rows), *rows.shape)


def _roundings_within(stage: Stage, boundaries: tuple[Boundary, ...]) -> tuple[Rounding, ...]:
    """What the engine has to do itself: what enters or leaves the stage as activations is rounded by its codec."""
    first = stage.start if stage.has_embedding else stage.start + 1
    last = stage.stop if stage.has_output else stage.stop - 1
    return tuple(
        Rounding(boundary.layer, functools.partial(rounded, boundary.codec))
        for boundary in boundaries
        if first <= boundary.layer <= last
    )
