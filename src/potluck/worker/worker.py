"""What the worker does with each message: a state machine over stages and sessions, without I/O. One call at a time."""

import gc
from collections.abc import Sequence

from potluck.core.errors import BadRequest, OutOfKvMemory, PotluckError
from potluck.engine.shard_engine import Notice, ShardEngine
from potluck.wire.messages import Sampler
from potluck.wire.work import (
    CloseSession,
    FromWorker,
    Load,
    LoadFailed,
    OpenSession,
    ParkSession,
    Rehearse,
    RunBatch,
    SessionOpened,
    SessionRefused,
    ToWorker,
    TruncateSession,
    Unload,
)
from potluck.wire.worker_settings import WorkerSettings
from potluck.worker.batch import BatchRunner
from potluck.worker.loaded_stages import LoadedStages, layers_of
from potluck.worker.sampler import TokenChooser
from potluck.worker.session import WorkerSession

_TEXT = 1024  # characters that a message of the protocol takes
_OTHERS_BEGIN_S = 0.0004  # a hop takes half of that between nodes on one machine
Answer = tuple[FromWorker, Sequence[bytes]]


class Worker:
    """Stages, sessions and samplers of one model. `is_finished`: the last stage was unloaded."""

    def __init__(self, settings: WorkerSettings, notice: Notice | None = None) -> None:
        self.is_finished = False
        self._stages = LoadedStages(settings, notice)
        self._sessions: dict[bytes, WorkerSession] = {}
        self._parked: dict[bytes, WorkerSession] = {}  # oldest first; they give way to sessions that need the room
        self._batches = BatchRunner(self._sessions, settings.row_norm_limit)

    def __repr__(self) -> str:
        return f"<Worker {len(self._stages)} stages, {len(self._sessions)} sessions>"

    def handle(self, message: ToWorker, body: bytes) -> list[Answer]:
        """Does as told and says what to answer; raises only what nobody expected."""
        if isinstance(message, RunBatch):
            return [self._batches.run(message, body)]
        if isinstance(message, OpenSession):
            return [(self._open(message), ())]
        if isinstance(message, TruncateSession):
            self._truncate(message)
        elif isinstance(message, Rehearse):
            self._batches.rehearse(message.item, body)
        elif isinstance(message, ParkSession):
            self._park(message)
        elif isinstance(message, CloseSession):
            self._close(message.session)
        elif isinstance(message, Load):
            return [(self._load(message), ())]
        elif isinstance(message, Unload):
            return [(refusal, ()) for refusal in self._unload(message)]
        return []

    def look_ahead(self) -> RunBatch | None:
        """To be called right after the answer to a batch, where no other message waits. The batch that is most likely to be next."""
        return self._batches.look_ahead()

    @property
    def others_turn_s(self) -> float:
        """After the answer to a batch: when another worker on the same device, if there is one, is likely to be computing."""
        return max(_OTHERS_BEGIN_S, self._batches.compute_s / 2)

    @property
    def times_of_batch(self) -> tuple[float, float]:
        """How long the last one took, and for how much of that this thread had a core."""
        return self._batches.compute_s, self._batches.on_core_s

    def claim_device(self) -> None:
        self._batches.claim_device()

    def _load(self, message: Load) -> FromWorker:
        try:
            loaded = self._stages.load(message.stage)
        except PotluckError as error:
            return LoadFailed(message.stage, error.code, str(error)[:_TEXT])
        gc.freeze()  # the compiler's many objects stay; looking through them again would stall a step for tens of milliseconds
        return loaded

    def _unload(self, message: Unload) -> list[SessionRefused]:
        """Sessions on the stage end with it. The daemon unloads what is idle, so there should be none."""
        refusals = []
        for engine in self._stages.unload(message.stage):
            refusals += self._end_sessions(engine)
            engine.close()
        self.is_finished = len(self._stages) == 0
        return refusals

    def _end_sessions(self, engine: ShardEngine) -> list[SessionRefused]:
        for session_id in [each for each, session in self._parked.items() if session.engine is engine]:
            self._close(session_id)
        doomed = [session_id for session_id, session in self._sessions.items() if session.engine is engine]
        for session_id in doomed:
            self._close(session_id)
        return [SessionRefused(session_id, "shard_unavailable", "its stage was unloaded") for session_id in doomed]

    def _open(self, message: OpenSession) -> FromWorker:
        try:
            if message.session in self._sessions:
                raise BadRequest("that session is open already")
            session = self._new_session(message)
        except PotluckError as error:
            return SessionRefused(message.session, error.code, str(error)[:_TEXT])
        self._sessions[message.session] = session
        return SessionOpened(message.session, session.engine.length(session.number))

    def _new_session(self, message: OpenSession) -> WorkerSession:
        engine, number = self._reserve(message)
        try:
            chooser = None
            if message.sampler is not None and message.stage.has_output:
                chooser = self._chooser(message.sampler, engine)
        except PotluckError:
            engine.close_session(number)
            raise
        lossy = tuple(boundary for boundary in message.boundaries if boundary.codec != "fp32")
        return WorkerSession(engine, number, message.stage, layers_of(message.stage), message.positions, lossy, chooser)

    def _reserve(self, message: OpenSession) -> tuple[ShardEngine, int]:
        """A place in an engine: a fork of the parked session that is resumed, or an empty one."""
        while True:
            parked = None if message.resumes is None else self._parked.get(message.resumes)
            try:
                if parked is None:
                    return self._stages.open(message.stage, message.positions)
                number = self._stages.fork(parked.engine, parked.number, message.positions)
            except OutOfKvMemory:
                if not self._parked:
                    raise
                # The one that is wanted goes last, and then everything is computed anew.
                self._close(min(self._parked, key=lambda session_id: session_id == message.resumes))
                continue
            parked.engine.truncate(number, min(message.resumed, parked.engine.length(number)))
            return parked.engine, number

    def _park(self, message: ParkSession) -> None:
        session = self._sessions.pop(message.session, None)
        if session is not None:
            session.park(message.length)
            self._parked[message.session] = session

    def _truncate(self, message: TruncateSession) -> None:
        session = self._sessions.get(message.session)
        if session is None:
            return  # refused or closed meanwhile; whoever asks for more of it is told
        session.truncate(message.length)
        if message.sampler is not None and session.stage.has_output:
            session.chooser = self._chooser_or_none(message.sampler, session.engine)

    def _close(self, session_id: bytes) -> None:
        session = self._sessions.pop(session_id, None) or self._parked.pop(session_id, None)
        if session is not None:
            session.close()

    def _chooser(self, sampler: Sampler, engine: ShardEngine) -> TokenChooser:
        return TokenChooser(sampler, engine.facts.vocabulary_size, self._stages.grammars)

    def _chooser_or_none(self, sampler: Sampler, engine: ShardEngine) -> TokenChooser | None:
        """A truncation has no answer: with a sampler that cannot be used, the next step that chooses is refused."""
        try:
            return self._chooser(sampler, engine)
        except PotluckError:
            return None
