"""Every message that nodes exchange, typed and bounded. No I/O; encoding is frames.py's, meaning is shard's and orchestrator's.

A message is one of the structs below, with a body of raw bytes where its type has one (token ids as little-endian int32, or
activations in the codec that the message names). Session ids are 16 random bytes, one for each stage of a pipeline, so that a node
can serve two stages of one; a message carries the receiver's, except to the head, which gets the sender's. Node ids are 32-byte
public keys.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from potluck.core.grammar import Grammar
from potluck.core.remembered import PROOF_BYTES
from potluck.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from potluck.identity.signed import Signed
from potluck.wire.spent import MAX_STAGES, SpentByStage

PROTOCOL_VERSION = 10
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
TensorNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
Microseconds = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    most_body_bytes: ClassVar[int] = 0  # no body, where a type does not say otherwise


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
    `forward_from` are kept, not sent on: whoever follows has them already. What a session has from there on when the epoch begins is
    owed to the next: it goes when REPLAY comes, or before the first step that would leave a gap.
    """

    previous: Neighbour | None
    next: Hop | None
    ring: Hop | None
    ring_from: Neighbour | None
    forward_from: Position
    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]  # shards in the pipeline, for the size of batches


class Open(_Message, frozen=True, tag="open"):
    """`resumes`: a session of the same head that ended with its KV kept, whose first `resumed` positions are the same tokens'.

    `resume_key`: by which the shard that samples remembers the tokens where the head is lost; empty: it does not.
    """

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
    resumes: SessionId | None = None
    resumed: Position = 0
    resume_key: Annotated[bytes, Meta(max_length=32)] = b""


class Opened(_Message, frozen=True, tag="opened"):
    """`length`: positions that it has already, from the session that it resumes."""

    session: SessionId
    epoch: Epoch
    length: Position = 0


class Refused(_Message, frozen=True, tag="refused"):
    session: SessionId
    epoch: Epoch
    code: Name
    message: Text


class Step(_Message, frozen=True, tag="step"):
    """Tokens position … position + count - 1. The body holds token ids (codec None) or activations that enter `layer`.

    `chooses`: after the last of them a token is to be chosen. `source`: the sender's own session, None from the head; a shard always
    tells it, so that nobody can have a shard feed a session that is not its own. `is_rehearsal`: the real one is about to follow; this
    one has no effect but to wake those who will handle it. `spent`: by each shard that it has been through in this round; the last
    field, because nothing else of a step is unknown before it is there (foreseen.py).
    """

    most_body_bytes: ClassVar[int] = 256 << 20

    session: SessionId
    epoch: Epoch
    position: Position
    count: Annotated[int, Meta(ge=1, le=MAX_STEP_TOKENS)]
    layer: Layer
    codec: Codec | None
    chooses: bool
    source: SessionId | None = None
    is_rehearsal: bool = False
    spent: SpentByStage = b""


class Result(_Message, frozen=True, tag="result"):
    """The token chosen for `position` (None: a chunk of the prompt went through), with the time that shards computed.

    `round_us`: since the token before it was chosen, by the last shard's clock, as the head may be late for one of them; 0: there was none.

    The body holds the scores of the prompt's tokens that the chunk predicts, where the sampler was asked for them.
    """

    most_body_bytes: ClassVar[int] = 1 << 20  # all tokens of the longest step, with all alternatives

    session: SessionId
    epoch: Epoch
    position: Position
    token: Token | None
    logprob: float | None = None
    top: Annotated[tuple[tuple[Token, float], ...], Meta(max_length=32)] = ()
    spent: SpentByStage = b""
    round_us: Microseconds = 0


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
    """Frees the session; also how a generation is cancelled. Not answered: it cannot fail.

    `keeps`: the KV of so many positions may stay for a while, for an OPEN that resumes the session; 0: nothing stays. Said again
    with 0, it frees what had stayed.
    """

    session: SessionId
    keeps: Position = 0


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
    """`worker_idle_us`: since the worker last gave a sign of life. `position_in`, `position_out`: what came and what left.

    `batches`: that the worker was given, of all sessions. Where they grow a session that stands still is waiting for its turn.
    """

    session: SessionId
    nonce: int
    is_known: bool
    worker_idle_us: int
    position_in: Position
    position_out: Position
    batches: Annotated[int, Meta(ge=0)] = 0


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
    vram_mb: Annotated[int, Meta(ge=0)] = 0  # that it needs of a GPU's memory; 0: none


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
    most_body_bytes: ClassVar[int] = 2 * (64 << 20)

    nonce: int
    manifest_bytes: Annotated[int, Meta(ge=0, le=64 << 20)]
    tokenizer_bytes: Annotated[int, Meta(ge=0, le=64 << 20)]


class GetAnswer(_Message, frozen=True, tag="get_answer"):
    """Asks for the tokens of an answer that broke off. `proof`: that the asker knows the `resume_key` of its head's OPEN."""

    nonce: int
    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class AnswerData(_Message, frozen=True, tag="answer_data"):
    """The body holds token ids: the prompt's, `prompt_length` of them, and all that were chosen since."""

    most_body_bytes: ClassVar[int] = 4 * MAX_HISTORY

    nonce: int
    prompt_length: Position


class BulkLink(_Message, frozen=True, tag="bulk_link"):
    """The first message on a link that is for weights only: requests that come on it are answered on it, by nobody else's way."""


class GetHoldings(_Message, frozen=True, tag="get_holdings"):
    """Asks which tensors of a model a node has bytes of, whether it serves them or not."""

    nonce: int
    weights_sha256: Name


class Holdings(_Message, frozen=True, tag="holdings"):
    """Tensors that are whole, as ranges start ≤ number < stop in the manifest's order."""

    nonce: int
    ranges: Annotated[tuple[tuple[TensorNumber, TensorNumber], ...], Meta(max_length=4096)]


class GetChunk(_Message, frozen=True, tag="get_chunk"):
    """Asks for one of the chunks into which the manifest cuts a tensor."""

    nonce: int
    weights_sha256: Name
    tensor: Name
    chunk: Annotated[int, Meta(ge=0, lt=1 << 32)]


class ChunkData(_Message, frozen=True, tag="chunk_data"):
    """The body holds the chunk. Whoever asked compares it with the manifest; nothing else says what it is."""

    most_body_bytes: ClassVar[int] = 1 << 20

    nonce: int


class Failed(_Message, frozen=True, tag="failed"):
    """The answer to a request (Describe, GetTokenizer, GetAnswer, GetHoldings, GetChunk) that could not be met."""

    nonce: int
    code: Name
    message: Text


# ---------------------------------------------------------------- membership: what swarm/gossip.py says and hears

DIGEST_BYTES = 28  # of one record: its key (8), incarnation (8), version (8), the beginning of its hash (4)
RECORD_KEY_BYTES = 8
BUCKET_HASH_BYTES = 8
MAX_BUCKETS = 256
MAX_DIGESTS = 2048  # in one message; together less than what travels as one urgent frame
MAX_RECORDS = 512
MAX_RECORD_AGE_MS = 1 << 40

Nonce = Annotated[int, Meta(ge=0, lt=1 << 62)]
Counting = Annotated[int, Meta(ge=0, lt=1 << 62)]  # only ever goes up


class Ping(_Message, frozen=True, tag="ping"):
    nonce: Nonce


class Pong(_Message, frozen=True, tag="pong"):
    nonce: Nonce


class Summary(_Message, frozen=True, tag="summary"):
    """A hash over all records that the sender holds; whoever holds others answers with Buckets."""

    root: Annotated[bytes, Meta(min_length=BUCKET_HASH_BYTES, max_length=BUCKET_HASH_BYTES)]
    count: Counting


class Buckets(_Message, frozen=True, tag="buckets"):
    """The same hash for each bucket of keys: 16 or 256 of them, after the key's first four or eight bits."""

    hashes: Annotated[bytes, Meta(min_length=16 * BUCKET_HASH_BYTES, max_length=MAX_BUCKETS * BUCKET_HASH_BYTES)]


class Digests(_Message, frozen=True, tag="digests"):
    """What the sender holds: all of the named buckets (of 256), or, where none is named, what is new to it."""

    buckets: Annotated[bytes, Meta(max_length=MAX_BUCKETS)]
    entries: Annotated[bytes, Meta(max_length=MAX_DIGESTS * DIGEST_BYTES)]


class Wanted(_Message, frozen=True, tag="wanted"):
    keys: Annotated[bytes, Meta(max_length=MAX_DIGESTS * RECORD_KEY_BYTES)]


class AgedRecord(msgspec.Struct, frozen=True, array_like=True):
    """`age_ms`: how long ago the statement was first heard of, as far as the sender knows. It can only shorten a life."""

    record: Signed
    age_ms: Annotated[int, Meta(ge=0, le=MAX_RECORD_AGE_MS)]


class Records(_Message, frozen=True, tag="records"):
    records: Annotated[tuple[AgedRecord, ...], Meta(max_length=MAX_RECORDS)]


class Suspicion(_Message, frozen=True, tag="suspicion"):
    """The node did not answer somebody, whose last word from it has this number. Whoever hears it looks for himself."""

    node: NodeId
    incarnation: Counting
    version: Counting


class TellMe(_Message, frozen=True, tag="tell_me"):
    """Whether the sender counts on the receiver for all news. Where either says so, both tell each other."""

    is_wanted: bool


class Chaos(_Message, frozen=True, tag="chaos"):
    """Asks a node to kill its own workers: for demonstrations, and obeyed only where its owner allows it."""

    nonce: int


SwarmMessage = Ping | Pong | Summary | Buckets | Digests | Wanted | Records | Suspicion | TellMe

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
    | GetAnswer
    | AnswerData
    | BulkLink
    | GetHoldings
    | Holdings
    | GetChunk
    | ChunkData
    | Failed
    | Ping
    | Pong
    | Summary
    | Buckets
    | Digests
    | Wanted
    | Records
    | Suspicion
    | TellMe
    | Chaos
)
