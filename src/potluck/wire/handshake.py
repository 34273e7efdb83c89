"""How two nodes show each other who they are, before anything else is parsed. No I/O; frames of fixed size; one version.

The accepter says HELLO (its id, a nonce), the dialer AUTH (its id, a nonce, a signature over both ids and both nonces), the
accepter a VERDICT (welcome or the reason why not, with its own signature). On TLS the accepter is known from its certificate
already; the same frames are used there, and the ids must agree.

AUTH has room for a ticket: the id of an invite, and a proof that the dialer knows its secret. Who issued it decides what it is worth.
"""

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

from potluck.core.errors import PeerRefused, ProtocolViolation, WrongPeer
from potluck.identity.keys import NodeKey, short_id, verify
from potluck.wire.messages import PROTOCOL_VERSION

MAGIC = b"PLK1"
PROTOCOL = b"potluck/link"
NONCE_BYTES = 32
REASON_BYTES = 64
INVITE_ID_BYTES = 8
PROOF_BYTES = 32
_NO_INVITE = bytes(INVITE_ID_BYTES)
_NO_PROOF = bytes(PROOF_BYTES)

_HELLO = struct.Struct("<4sHxx32s32s")  # magic, version, accepter's id, accepter's nonce
_AUTH = struct.Struct("<4sHxx32s32s8s32s64s")  # magic, version, dialer's id, its nonce, invite id, proof, signature
_VERDICT = struct.Struct(
    f"<4sHB?{REASON_BYTES}s64s"
)  # magic, version, length of the reason, welcome, reason, signature
HELLO_BYTES, AUTH_BYTES, VERDICT_BYTES = _HELLO.size, _AUTH.size, _VERDICT.size


class _Role(enum.Enum):
    """Part of what is signed, so that neither side's signature can be turned into the other's."""

    DIALER = b"dialer"
    ACCEPTER = b"accepter"
    TICKET = b"ticket"


def _statement(role: _Role, accepter: bytes, dialer: bytes, accepter_nonce: bytes, dialer_nonce: bytes) -> bytes:
    # The ids and nonces have fixed sizes, so the parts cannot be cut otherwise.
    return (
        b"\0".join((PROTOCOL, role.value, b""))
        + struct.pack("<H", PROTOCOL_VERSION)
        + accepter
        + dialer
        + accepter_nonce
        + dialer_nonce
    )


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a dialer knows of an invite: its id (never all zeros) and its secret, which is proven and not sent."""

    invite_id: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"<Ticket {self.invite_id.hex()}>"

    def present(self, statement: bytes) -> "PresentedTicket":
        return PresentedTicket(self.invite_id, _proof(self.secret, self.invite_id, statement), statement)


@dataclass(frozen=True, slots=True)
class PresentedTicket:
    """What an accepter sees of a ticket. The proof is good for one dialer, one accepter and one connection."""

    invite_id: bytes
    proof: bytes
    statement: bytes

    def is_proven_by(self, secret: bytes) -> bool:
        return hmac.compare_digest(self.proof, _proof(secret, self.invite_id, self.statement))


def _proof(secret: bytes, invite_id: bytes, statement: bytes) -> bytes:
    return hmac.digest(secret, statement + invite_id, hashlib.sha256)


def _check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolViolation("the other side does not speak this protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolViolation(
            f"the other side speaks version {version} of the protocol, this one is {PROTOCOL_VERSION}"
        )


class AccepterHandshake:
    """The accepter's side of one connection: `hello` goes out first; `check_auth` says who is there; `verdict` ends it."""

    def __init__(self, key: NodeKey, nonce: bytes) -> None:
        """`nonce`: 32 random bytes, never used before."""
        self._key = key
        self._nonce = nonce
        self._statement: bytes | None = None
        self.ticket: PresentedTicket | None = None
        self.hello = _HELLO.pack(MAGIC, PROTOCOL_VERSION, key.node_id, nonce)

    def check_auth(self, data: bytes) -> bytes:
        """The dialer's id; its ticket is in `ticket` then. Raises ProtocolViolation for a frame or signature that is wrong."""
        dialer: bytes
        magic, version, dialer, dialer_nonce, invite_id, proof, signature = _AUTH.unpack(data)
        _check_start(magic, version)
        parties = (self._key.node_id, dialer, self._nonce, dialer_nonce)
        if not verify(dialer, signature, _statement(_Role.DIALER, *parties) + invite_id + proof):
            raise ProtocolViolation("the dialer's signature is wrong")
        if invite_id != _NO_INVITE:
            self.ticket = PresentedTicket(invite_id, proof, _statement(_Role.TICKET, *parties))
        self._statement = _statement(_Role.ACCEPTER, *parties)
        return dialer

    def verdict(self, refusal: str | None) -> bytes:
        """The last frame: welcome, or a refusal, of which the first 64 bytes arrive."""
        assert self._statement is not None, "no verdict before the dialer is known"
        reason = (refusal or "").encode(errors="replace")[:REASON_BYTES]
        start = _VERDICT.pack(MAGIC, PROTOCOL_VERSION, len(reason), refusal is None, reason, b"")[:-64]
        return start + self._key.sign(self._statement + start)


class DialerHandshake:
    """The dialer's side: `auth` answers HELLO, `check_verdict` ends it. `expected` None: whoever answers is welcome."""

    def __init__(self, key: NodeKey, expected: bytes | None, nonce: bytes, ticket: Ticket | None = None) -> None:
        self._key = key
        self._expected = expected
        self._nonce = nonce
        self._ticket = ticket
        self._statement = b""
        self.accepter = b""

    def auth(self, hello: bytes) -> bytes:
        """The answer to HELLO. Raises ProtocolViolation, or WrongPeer before anything was signed."""
        magic, version, accepter, accepter_nonce = _HELLO.unpack(hello)
        _check_start(magic, version)
        if self._expected is not None and not hmac.compare_digest(self._expected, accepter):
            raise WrongPeer(f"expected node {short_id(self._expected)}, found {short_id(accepter)}")
        self.accepter = accepter
        dialer = self._key.node_id
        parties = (accepter, dialer, accepter_nonce, self._nonce)
        self._statement = _statement(_Role.ACCEPTER, *parties)
        invite_id, proof = self._presented(_statement(_Role.TICKET, *parties))
        signature = self._key.sign(_statement(_Role.DIALER, *parties) + invite_id + proof)
        return _AUTH.pack(MAGIC, PROTOCOL_VERSION, dialer, self._nonce, invite_id, proof, signature)

    def _presented(self, statement: bytes) -> tuple[bytes, bytes]:
        if self._ticket is None:
            return _NO_INVITE, _NO_PROOF
        presented = self._ticket.present(statement)
        return presented.invite_id, presented.proof

    def check_verdict(self, data: bytes) -> None:
        """Returns when welcome. Raises PeerRefused with the reason, WrongPeer for a signature that is not the accepter's."""
        magic, version, length, is_welcome, reason, signature = _VERDICT.unpack(data)
        _check_start(magic, version)
        if not verify(self.accepter, signature, self._statement + data[:-64]):
            raise WrongPeer(f"whoever answered does not hold the key of node {short_id(self.accepter)}")
        if not is_welcome:
            raise PeerRefused(_printable(reason[:length]))


def _printable(reason: bytes) -> str:
    """A stranger's text, made fit for logs and terminals."""
    text = reason.decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)
