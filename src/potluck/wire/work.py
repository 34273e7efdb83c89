"""What a daemon and its worker process say to each other, over one private stream. No I/O.

The daemon decides (sessions, order, batches); the worker holds weights, KV and samplers, and does as told, in the order told. It is
never sent keys, addresses or anything of the network.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from potluck.wire.messages import Boundary, Codec, Name, Position, Sampler, SessionId, Stage, Text, Token


class _Work(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


# ---------------------------------------------------------------- daemon to worker


class Load(_Work, frozen=True, tag="load"):
    """Load a stage of the model that the worker was started for; answered by Loaded or LoadFailed."""

    stage: Stage


class Unload(_Work, frozen=True, tag="unload"):
    """Drop a loaded stage; the worker ends by itself when none is left."""

    stage: Stage


class OpenSession(_Work, frozen=True, tag="open_session"):
    """Reserve KV for `positions` on the part `stage` of a loaded shard; answered by SessionOpened or SessionRefused.

    `resumes`: a parked session of the same stage and boundaries, whose first `resumed` positions this one begins with.
    """

    session: SessionId
    stage: Stage
    positions: Position
    boundaries: Annotated[tuple[Boundary, ...], Meta(max_length=64)]
    sampler: Sampler | None
    resumes: SessionId | None = None
    resumed: Position = 0


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """One session's step in a batch. Its input is `size_bytes` of the batch's body, after those of the items before it.

    `codec` None: token ids (int32); otherwise activations. `output_codec` None: no activations are wanted back.
    """

    session: SessionId
    position: Position
    count: int
    codec: Codec | None
    output_codec: Codec | None
    chooses: bool
    size_bytes: int
    scores_prompt: bool = False  # the output's bytes are the scores of the prompt's tokens that these positions predict


class RunBatch(_Work, frozen=True, tag="run_batch"):
    batch: int
    items: tuple[WorkItem, ...]


class Rehearse(_Work, frozen=True, tag="rehearse"):
    """A batch of one item like this is about to come: do all but the computing, forget it, and stay awake. No answer."""

    item: WorkItem


class Attend(_Work, frozen=True, tag="attend"):
    """One answer is on its way: keep off the daemons' core, and look so long for what comes next, where it is soon. 0: no more of it."""

    look_s: Annotated[float, Meta(ge=0, le=1)]


class TruncateSession(_Work, frozen=True, tag="truncate_session"):
    """Forget what is past `length`; `sampler` replaces the one given at opening (a new epoch's journal)."""

    session: SessionId
    length: Position
    sampler: Sampler | None


class ParkSession(_Work, frozen=True, tag="park_session"):
    """Nothing more comes for it. Keep the KV of `length` positions for sessions that resume it, as long as nobody needs the room."""

    session: SessionId
    length: Position


class CloseSession(_Work, frozen=True, tag="close_session"):
    session: SessionId


ToWorker = Load | Unload | OpenSession | RunBatch | Rehearse | Attend | TruncateSession | ParkSession | CloseSession


# ---------------------------------------------------------------- worker to daemon


class Loaded(_Work, frozen=True, tag="loaded"):
    stage: Stage
    weight_bytes: int
    kv_budget_bytes: int
    step_us: int  # one token through this stage, measured after warming up
    device_bytes: int = 0  # that the stage takes of a GPU's memory


class LoadFailed(_Work, frozen=True, tag="load_failed"):
    stage: Stage
    code: Name
    message: Text


class SessionOpened(_Work, frozen=True, tag="session_opened"):
    """`length`: positions that it has from the session that it resumes; 0 where that is gone."""

    session: SessionId
    length: Position = 0


class SessionRefused(_Work, frozen=True, tag="session_refused"):
    session: SessionId
    code: Name
    message: Text


class WorkOutput(msgspec.Struct, frozen=True, array_like=True):
    """What became of one item: activations or scores (in the batch's body), a chosen token, or an error; `code` "" means it went well."""

    session: SessionId
    size_bytes: int
    token: Token | None
    logprob: float | None
    top: tuple[tuple[Token, float], ...]
    code: Name
    message: Text


class BatchDone(_Work, frozen=True, tag="batch_done"):
    batch: int
    outputs: tuple[WorkOutput, ...]
    compute_us: int


FromWorker = Loaded | LoadFailed | SessionOpened | SessionRefused | BatchDone

__all__ = [
    "Attend",
    "BatchDone",
    "CloseSession",
    "FromWorker",
    "Load",
    "LoadFailed",
    "Loaded",
    "OpenSession",
    "ParkSession",
    "RunBatch",
    "SessionOpened",
    "SessionRefused",
    "ToWorker",
    "TruncateSession",
    "Unload",
    "WorkItem",
    "WorkOutput",
]
