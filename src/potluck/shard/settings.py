"""What one served shard allows: its limits, what the outside may know of it, and why it would not open a session. Pure data."""

import msgspec

from potluck.wire.messages import Open, Stage


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one served shard. `width_bytes` gives the size of a row of activations in a codec."""

    model: str
    weights_sha256: str
    arithmetic: int
    layer_count: int
    hidden_size: int
    stage: Stage
    max_concurrent_streams: int = 16
    outbox_budget_bytes: int = 256 << 20
    max_waiting: int = 64  # steps of one session
    batch_tokens: int = 256  # of prompts, in one batch
    replay_rows: int = 128  # in one replayed step
    eviction_idle_s: float = 600.0  # of the shard, and of KV that was left for a next request
    silent_session_s: float = 300.0  # a session of which nothing is heard for so long gives its stream back
    parked_sessions: int = 32  # at most so many of those
    is_spare: bool = False
    vram_required_mb: int = 0  # of a GPU's memory, planned; what was taken counts once it is loaded
    rehearsal_lead_s: float = (
        0.0  # how long before a token is done the next shard is woken; 0: never. See rehearsals.py
    )
    rehearsal_shortest_s: float = (
        0.0006  # shorter steps are not rehearsed: the rehearsal takes about that long to arrive
    )
    rehearsal_reaches_worker: bool = True  # and not only the daemons on its way
    rehearsal_watch_s: float = (
        0.0  # how long the daemon stays awake after a rehearsal, sent or received, for what was rehearsed
    )
    spin_s: float = 0.0  # how long the daemon stays awake for the next step; see net/spinning.py
    look_s: float = (
        0.0  # the same of daemon and worker, on few cores, while one answer decodes and what comes is so quick
    )


class ShardState(msgspec.Struct, frozen=True):
    """What the outside may know."""

    is_loaded: bool
    streams: int
    queue_depth: int
    step_us: int


def objection(message: Open, settings: ShardSettings, streams: int, *, is_known: bool) -> tuple[str, str] | None:
    """Why a session cannot be opened here, as code and words; None where it can, as far as the daemon knows."""
    mine, wanted = settings.stage, message.stage
    if message.weights_sha256 != settings.weights_sha256:  # the same weights may have another name elsewhere
        if message.model != settings.model:
            return "bad_request", f"this shard serves {settings.model}, not {message.model}"
        return "weights_mismatch", "this shard holds other weights under that name"
    if message.arithmetic != settings.arithmetic:
        return "weights_mismatch", f"this shard computes by arithmetic {settings.arithmetic}, not {message.arithmetic}"
    if not _lies_within(wanted, mine):
        return "shard_unavailable", f"layers {wanted.start}-{wanted.stop - 1} are not served here"
    if (wanted.has_output and message.sampler is None) or message.positions < 1:
        return "bad_request", "a stage with the output needs a sampler, and a session room for a position"
    if is_known:
        return "bad_request", "that session is open already"
    if streams >= settings.max_concurrent_streams:
        return "shard_unavailable", f"all {settings.max_concurrent_streams} streams are taken"
    return None


def _lies_within(wanted: Stage, mine: Stage) -> bool:
    if wanted.has_embedding and not (mine.has_embedding and wanted.start == 0):
        return False
    if wanted.has_output and not (mine.has_output and wanted.stop == mine.stop):
        return False
    return mine.start <= wanted.start <= wanted.stop <= mine.stop
