"""What members of a swarm state about it: who founded it, who belongs, who is out, which models it serves. No I/O, no clock.

Payloads of `Signed` statements, bounded and typed. Whether a statement counts is the roster's business.
"""

import enum
import functools
import hashlib
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from potluck.core.errors import RecordRefused
from potluck.identity.keys import NODE_ID_BYTES, NodeKey
from potluck.identity.signed import Signed, sign

SWARM_ID_BYTES = 16
NONCE_BYTES = 16
MAX_KEPT = 1024
MAX_NAME_CHARACTERS = 64
_SWARM_DOMAIN = b"potluck/swarm\0"
_REMEMBERED = 1 << 15  # small records whose signature was checked; a record comes from many neighbours
SMALL_BYTES = 1024
MAX_SERIAL = (1 << 53) - 1

SwarmId = Annotated[bytes, Meta(min_length=SWARM_ID_BYTES, max_length=SWARM_ID_BYTES)]
NodeId = Annotated[bytes, Meta(min_length=NODE_ID_BYTES, max_length=NODE_ID_BYTES)]
Serial = Annotated[int, Meta(ge=1, le=MAX_SERIAL)]
"""Of two records by one signer about one subject the one with the higher serial counts."""


class Trust(enum.StrEnum):
    """`invited` may be in touch, `member` may also ask, `trusted` may also serve layers and so see activations."""

    INVITED = "invited"
    MEMBER = "member"
    TRUSTED = "trusted"

    @property
    def rank(self) -> int:
        return _RANKS[self]

    def covers(self, other: "Trust") -> bool:
        return self.rank >= other.rank


_RANKS = {trust: rank for rank, trust in enumerate(Trust)}


class RefusalReason(enum.StrEnum):
    """Why a record counts for nothing. The last four may change with what else becomes known, hence such records are kept a while."""

    NOT_AUTHENTIC = "not_authentic"
    MALFORMED = "malformed"
    OTHER_SWARM = "other_swarm"
    SUPERSEDED = "superseded"
    SUBJECT_EXPELLED = "subject_expelled"
    TOO_MANY = "too_many"
    SIGNER_EXPELLED = "signer_expelled"
    SIGNER_UNKNOWN = "signer_unknown"
    NOT_ENTITLED = "not_entitled"
    NOT_FOUNDED = "not_founded"


class _Statement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Founding(_Statement, frozen=True):
    """The first record: whoever signed it is the swarm's founder, and its id is made of that key."""

    kind = "founding"

    swarm: SwarmId
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]


class Membership(_Statement, frozen=True):
    """`subject` belongs to the swarm. Only the founder can delegate inviting and expelling."""

    kind = "member"

    swarm: SwarmId
    subject: NodeId
    serial: Serial
    trust: Trust
    may_invite: bool = False
    may_expel: bool = False

    @property
    def is_delegate(self) -> bool:
        return self.may_invite or self.may_expel


class Kept(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member whom the founder vouches for from now on, as the expelled one's record with that serial had it."""

    subject: NodeId
    serial: Serial
    trust: Trust


class Expulsion(_Statement, frozen=True):
    """`subject` is out for good. Of what it ever signed only `keeps` stays, whichever arrives first; `keeps` is the founder's to give."""

    kind = "expulsion"

    swarm: SwarmId
    subject: NodeId
    serial: Serial
    keeps: Annotated[tuple[Kept, ...], Meta(max_length=MAX_KEPT)] = ()


class ServedModel(_Statement, frozen=True):
    """The swarm serves a model, or (`is_served` False) no longer."""

    kind = "model"

    swarm: SwarmId
    subject: Annotated[str, Meta(min_length=1, max_length=256)]  # the model's id
    serial: Serial
    weights_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    objective: Literal["latency", "throughput"] = "latency"
    context_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    streams: Annotated[int, Meta(ge=1, le=4096)] = 1
    is_served: bool = True


Statement = Founding | Membership | Expulsion | ServedModel
SubjectStatement = Membership | Expulsion | ServedModel
_DECODERS: dict[str, msgspec.msgpack.Decoder[Statement]] = {
    each.kind: msgspec.msgpack.Decoder(each) for each in (Founding, Membership, Expulsion, ServedModel)
}
KINDS = frozenset(_DECODERS)
"""The kinds of `Signed` that a roster takes."""


class Record(NamedTuple):
    """A statement as it was signed, and what it says."""

    signed: Signed
    statement: Statement
    digest: bytes


def state(key: NodeKey, statement: Statement) -> Signed:
    """The statement, signed."""
    return sign(key, statement.kind, msgspec.msgpack.encode(statement))


def read_record(signed: Signed) -> Record:
    """An authentic record. Raises RecordRefused: malformed, not_authentic."""
    return _read_small(signed) if len(signed.payload) <= SMALL_BYTES else _read(signed)


@functools.lru_cache(maxsize=_REMEMBERED)
def _read_small(signed: Signed) -> Record:
    return _read(signed)


def _read(signed: Signed) -> Record:
    decoder = _DECODERS.get(signed.kind)
    if decoder is None:
        raise RecordRefused(RefusalReason.MALFORMED)
    if not signed.is_authentic:
        raise RecordRefused(RefusalReason.NOT_AUTHENTIC)
    try:
        statement = decoder.decode(signed.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RecordRefused(RefusalReason.MALFORMED) from None
    return Record(signed, statement, record_digest(signed))


def record_digest(signed: Signed) -> bytes:
    """16 bytes that name what is stated by whom; two signatures of the same make no difference."""
    parts = (signed.signer, signed.kind.encode(), b"\0", signed.payload)
    return hashlib.sha256(b"".join(parts)).digest()[:16]


def swarm_id(founder: bytes, nonce: bytes) -> bytes:
    return hashlib.sha256(_SWARM_DOMAIN + founder + nonce).digest()[:SWARM_ID_BYTES]


def found(key: NodeKey, name: str, nonce: bytes) -> Signed:
    """A new swarm's first record. `nonce`: 16 random bytes."""
    return state(key, Founding(swarm_id(key.node_id, nonce), nonce, name))
