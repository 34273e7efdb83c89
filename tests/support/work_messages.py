"""One message of every kind that a daemon and its worker say to each other, some of them with a body."""

from potluck.core.sampling_params import SamplingParams
from potluck.wire.messages import Boundary, Sampler, Stage
from potluck.wire.work import (
    Attend,
    BatchDone,
    CloseSession,
    FromWorker,
    Load,
    Loaded,
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
    WorkItem,
    WorkOutput,
)

SESSION = bytes(range(16))
STAGE = Stage(0, 15, True, False)
SAMPLER = Sampler(SamplingParams(temperature=0.7, logit_bias={3: 1.5}, seed=9), 1, 2, (5, 6, 7), (2,), 100)
TO_WORKER: list[tuple[ToWorker, bytes]] = [
    (Load(STAGE), b""),
    (OpenSession(SESSION, STAGE, 200, (Boundary(3, "int8"),), SAMPLER), b""),
    (RunBatch(7, (WorkItem(SESSION, 4, 1, "fp32", "int8", True, 2304),)), bytes(range(256)) * 9),
    (Rehearse(WorkItem(SESSION, 5, 1, "fp32", "fp32", False, 256)), b""),
    (Attend(0.003), b""),
    (TruncateSession(SESSION, 3, None), b""),
    (ParkSession(SESSION, 3), b""),
    (OpenSession(SESSION, STAGE, 200, (), None, SESSION[::-1], 64), b""),
    (CloseSession(SESSION), b""),
    (Unload(STAGE), b""),
]
FROM_WORKER: list[tuple[FromWorker, bytes]] = [
    (Loaded(STAGE, 1, 2, 3), b""),
    (LoadFailed(STAGE, "bad_model_file", "no"), b""),
    (SessionOpened(SESSION), b""),
    (SessionRefused(SESSION, "kv_budget_exceeded", "full"), b""),
    (BatchDone(7, (WorkOutput(SESSION, 3, 5, -0.5, ((5, -0.5),), "", ""),), 4000), b"abc"),
]
