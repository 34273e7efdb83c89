"""Every message that nodes exchange, typed and bounded. No I/O; encoding is frames.py's, meaning is shard's and orchestrator's.

A message is one of the structs below, with an optional body of raw bytes (token ids as little-endian int32, or activations in the
codec that the message names). Session ids are 16 random bytes, one for each stage of a pipeline, so that a node can serve two stages
of one; a message carries the receiver's, except to the head, which gets the sender's. Node ids are 32-byte public keys.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from potluck.core.grammar import Grammar
from potluck.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

PROTOCOL_VERSION = 1
MAX_POSITIONS = 1 << 20
MAX_STEP_TOKENS = 4096
MAX_HISTORY = 1 << 20

SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
NodeId = Annotated[bytes, Meta(min_length=32, max_length=32)]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 31)]
Position = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1024)]
Address = Annotated[str, Meta(max_length=256)]
Codec = Literal["fp32", "fp16", "int8"]
Layer = Annotated[int, Meta(ge=0, le=4096)]
Microseconds = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """A stage elsewhere: its node, where that can be reached, and the session there."""

    node: NodeId
    address: Address
    session: SessionId


class Neighbour(msgspec.Struct, frozen=True, array_like=True):
    """Whoever may send steps: a node, and its own session there. The node alone would let its other heads speak through it."""

    node: NodeId
    session: SessionId


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """What one shard does in a pipeline: layers start ≤ layer < stop (perhaps none), the embedding before, the output after."""

    start: Layer
    stop: Layer
    has_embedding: bool = False
    has_output: bool = False


class Boundary(msgspec.Struct, frozen=True, array_like=True):
    """Activations that enter `layer` are rounded as `codec` does, whoever computes them: part of the session, not of a link."""

    layer: Layer
    codec: Codec


class Sampler(msgspec.Struct, frozen=True, array_like=True):
    """What the shard that owns the output needs to choose tokens. `history` is the prompt and all that was accepted."""

    params: SamplingParams
    choice: Annotated[int, Meta(ge=0, lt=1 << 16)]
    prompt_length: Position
    history: Annotated[tuple[Token, ...], Meta(max_length=MAX_HISTORY)]
    eos: Annotated[tuple[Token, ...], Meta(max_length=64)]
    limit: Position  # no token is chosen for this position or a later one
    grammar: Grammar | None = None  # what the tokens after the prompt must spell
    # How many alternatives to give with the log probability of every token of the prompt; None: nothing of that is wanted.
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class Wiring(msgspec.Struct, frozen=True, array_like=True):
    """A shard's place among its neighbours, for one epoch.

    `previous` None: steps come from the head. `next` None: results go to the head. `ring`: the first stage, to which the last may
    send tokens directly, on credits from the head; `ring_from`: the last, for the first. Outputs for positions below
    `forward_from` are kept, not sent on: whoever follows has them already.
    """

    previous: Neighbour | None
    next: Hop | None
    ring: Hop | None
    ring_from: Neighbour | None
    forward_from: Position
    stages: Annotated[int, Meta(ge=1, le=64)]  # shards in the pipeline, for the size of batches


class Open(_Message, frozen=True, tag="open"):
    session: SessionId
    epoch: Epoch
    model: Name
    weights_sha256: Name
    arithmetic: int
    stage: Stage
    positions: Position
    wiring: Wiring
    boundaries: Annotated[tuple[Boundary, ...], Meta(max_length=64)] = ()
    sampler: Sampler | None = None
    keeps_outbox: bool = True


class Opened(_Message, frozen=True, tag="opened"):
    session: SessionId
    epoch: Epoch


class Refused(_Message, frozen=True, tag="refused"):
    session: SessionId
    epoch: Epoch
    code: Name
    message: Text


class Step(_Message, frozen=True, tag="step"):
    """Tokens position … position + count - 1. The body holds token ids (codec None) or activations that enter `layer`.

    `chooses`: after the last of them a token is to be chosen. `source`: the sender's own session, None from the head; a shard always
    tells it, so that nobody can have a shard feed a session that is not its own.
    """

    session: SessionId
    epoch: Epoch
    position: Position
    count: Annotated[int, Meta(ge=1, le=MAX_STEP_TOKENS)]
    layer: Layer
    codec: Codec | None
    chooses: bool
    compute_us: Microseconds = 0  # summed over the shards so far, for the head's breakdown
    queue_us: Microseconds = 0  # likewise: from a step's arrival to its output, less computing
    source: SessionId | None = None


class Result(_Message, frozen=True, tag="result"):
    """The token chosen for `position` (None: a chunk of the prompt went through), with the time that shards computed.

    The body holds the scores of the prompt's tokens that the chunk predicts, where the sampler was asked for them.
    """

    session: SessionId
    epoch: Epoch
    position: Position
    token: Token | None
    logprob: float | None = None
    top: Annotated[tuple[tuple[Token, float], ...], Meta(max_length=32)] = ()
    compute_us: Microseconds = 0
    queue_us: Microseconds = 0


class Rewire(_Message, frozen=True, tag="rewire"):
    """A new epoch: forget what is past `length`, take these neighbours, drop frames of older epochs."""

    session: SessionId
    epoch: Epoch
    length: Position
    wiring: Wiring
    sampler: Sampler | None = None


class Rewired(_Message, frozen=True, tag="rewired"):
    """`outbox_from`: outputs of positions from here to the session's length are kept (its length: none are)."""

    session: SessionId
    epoch: Epoch
    length: Position
    outbox_from: Position


class Replay(_Message, frozen=True, tag="replay"):
    """Send what was sent before for positions start … stop - 1 to the (new) next shard."""

    session: SessionId
    epoch: Epoch
    start: Position
    stop: Position


class Truncate(_Message, frozen=True, tag="truncate"):
    session: SessionId
    epoch: Epoch
    length: Position


class Credit(_Message, frozen=True, tag="credit"):
    """The ring may choose `tokens` more before the head must speak again."""

    session: SessionId
    epoch: Epoch
    tokens: Annotated[int, Meta(ge=1, le=4096)]


class Close(_Message, frozen=True, tag="close"):
    """Frees the session; also how a generation is cancelled. Not answered: it cannot fail."""

    session: SessionId


class ShardLost(_Message, frozen=True, tag="shard_lost"):
    """From a session's head to those who stay in its pipeline: that node's shard was lost. Believed for routing, for a while."""

    session: SessionId
    node: NodeId
    model: Name
    stage: Stage
    reason: Text


class Probe(_Message, frozen=True, tag="probe"):
    session: SessionId
    nonce: int


class Probed(_Message, frozen=True, tag="probed"):
    """`worker_idle_us`: since the worker last gave a sign of life. `position_in`, `position_out`: what came and what left."""

    session: SessionId
    nonce: int
    is_known: bool
    worker_idle_us: int
    position_in: Position
    position_out: Position


class Fault(_Message, frozen=True, tag="fault"):
    """Something broke for a session. `culprit` is the node at fault, as far as the sender can tell."""

    session: SessionId
    epoch: Epoch
    code: Name
    message: Text
    culprit: NodeId | None


class Describe(_Message, frozen=True, tag="describe"):
    """Asks a node what it serves."""

    nonce: int


class ShardInfo(msgspec.Struct, frozen=True, array_like=True):
    model: Name
    weights_sha256: Name
    arithmetic: int
    layer_count: Layer
    stage: Stage
    is_loaded: bool
    max_streams: int
    streams: int
    queue_depth: int
    step_us: int  # running average for one token; 0: unknown
    is_spare: bool = False  # used where others fail, not before


class Described(_Message, frozen=True, tag="described"):
    nonce: int
    node: NodeId
    version: Name
    shards: Annotated[tuple[ShardInfo, ...], Meta(max_length=64)]
    daemon_pid: int
    worker_pids: Annotated[tuple[int, ...], Meta(max_length=64)]


class GetTokenizer(_Message, frozen=True, tag="get_tokenizer"):
    """Asks for the manifest (which the model's hash covers) and the tokenizer that it names. The answer's body holds both."""

    nonce: int
    weights_sha256: Name


class TokenizerData(_Message, frozen=True, tag="tokenizer_data"):
    nonce: int
    manifest_bytes: Annotated[int, Meta(ge=0, le=64 << 20)]
    tokenizer_bytes: Annotated[int, Meta(ge=0, le=64 << 20)]


class Failed(_Message, frozen=True, tag="failed"):
    """The answer to a request (Describe, GetTokenizer) that could not be met."""

    nonce: int
    code: Name
    message: Text


Message = (
    Open
    | Opened
    | Refused
    | Step
    | Result
    | Rewire
    | Rewired
    | Replay
    | Truncate
    | Credit
    | Close
    | ShardLost
    | Probe
    | Probed
    | Fault
    | Describe
    | Described
    | GetTokenizer
    | TokenizerData
    | Failed
)
