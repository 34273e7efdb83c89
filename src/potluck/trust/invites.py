"""Invites: one string that lets a newcomer in, and the book in which its issuer keeps what it has promised. No I/O, no clock.

The string names swarm, issuer and where that is reached, and carries a secret that is proven in the handshake and never sent. What
it is worth (trust, uses, expiry) stands in the issuer's book only, by the issuer's clock; the expiry in the string is for people.
"""

import enum
import hashlib
import ipaddress
import struct
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from potluck.core.errors import BadInvite, BadRequest
from potluck.net.addresses import format_address, parse_address
from potluck.trust.records import NodeId, SwarmId, Trust
from potluck.wire.handshake import INVITE_ID_BYTES, PresentedTicket, Ticket

PREFIX = "potluck-"
SECRET_BYTES = 16
MAX_ADDRESSES = 8
MAX_INVITES = 1024
MAX_USES = 1024
MAX_EXPIRY_S = 1 << 40
KEPT_AFTER_EXPIRY_S = 30 * 86400.0  # so that whoever comes late hears "expired" rather than "unknown"
_MAX_TEXT = 4096
_MAX_NAME_BYTES = 247
_VERSION = 1
_CHECKSUM_BYTES = 4
_DOMAIN = b"potluck/invite\0"
_HEAD = struct.Struct(">B16s32s8s16s5sB")  # version, swarm, issuer, invite id, secret, expiry, number of addresses
_PORT = struct.Struct(">H")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no i, l, o or u
_DIGITS = {character: value for value, character in enumerate(_ALPHABET)} | {"i": 1, "l": 1, "o": 0}


class Invite(NamedTuple):
    swarm: bytes
    issuer: bytes
    invite_id: bytes
    secret: bytes
    expires_at_s: int
    """Unix time at the issuer."""
    addresses: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Invite {self.invite_id.hex()} to {self.swarm.hex()[:8]}>"

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.invite_id, self.secret)


def encode_invite(invite: Invite) -> str:
    """The string. Raises BadRequest for addresses that do not fit."""
    if len(invite.addresses) > MAX_ADDRESSES:
        raise BadRequest(f"an invite names {MAX_ADDRESSES} addresses at most")
    head = _HEAD.pack(
        _VERSION, invite.swarm, invite.issuer, invite.invite_id, invite.secret, invite.expires_at_s.to_bytes(5), len(invite.addresses)
    )  # fmt: skip
    body = head + b"".join(_pack_address(address) for address in invite.addresses)
    return PREFIX + _to_text(body + _checksum(body))


def decode_invite(text: str) -> Invite:
    """What an invite says. Spaces and line breaks inside do no harm. Raises BadInvite."""
    if len(text) > _MAX_TEXT:
        raise BadInvite("an invite is much shorter than that")
    text = "".join(text.split()).lower()
    if not text.startswith(PREFIX):
        raise BadInvite(f"an invite starts with {PREFIX}; copy it again, without what is before that")
    data = _from_text(text.removeprefix(PREFIX))
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(body) < _HEAD.size or checksum != _checksum(body):
        raise BadInvite("this invite was altered or cut short; copy it again")
    version, swarm, issuer, invite_id, secret, expiry, count = _HEAD.unpack_from(body)
    if version != _VERSION:
        raise BadInvite(f"this invite is of version {version}; this Potluck reads version {_VERSION}")
    addresses = _unpack_addresses(body[_HEAD.size :], count)
    if invite_id == bytes(INVITE_ID_BYTES):
        raise BadInvite("this invite names no entry in its issuer's book")
    return Invite(swarm, issuer, invite_id, secret, int.from_bytes(expiry), addresses)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + body).digest()[:_CHECKSUM_BYTES]


def _pack_address(address: str) -> bytes:
    """A byte says what comes: 4 and 6 for addresses of those families, otherwise the length of a name plus 8."""
    host, port = parse_address(address)
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("ascii", errors="replace")
        if not 1 <= len(name) <= _MAX_NAME_BYTES or b"?" in name:
            raise BadRequest(f'"{host}" is not a host name that fits an invite') from None
        return bytes([8 + len(name)]) + name + _PORT.pack(port)
    if "%" in host:
        raise BadRequest(f'"{host}" means something on this machine only')
    return bytes([parsed.version]) + parsed.packed + _PORT.pack(port)


def _unpack_addresses(data: bytes, count: int) -> tuple[str, ...]:
    addresses = []
    if count > MAX_ADDRESSES:
        raise BadInvite("an invite with too many addresses")
    for _ in range(count):
        kind = data[0] if data else 0
        size = {4: 4, 6: 16}.get(kind, kind - 8)
        host, port, rest = data[1 : 1 + size], data[1 + size : 3 + size], data[3 + size :]
        if size < 1 or len(host) < size or len(port) < 2:
            raise BadInvite("an invite with an address that is none")
        addresses.append(format_address(_host_text(kind, host), _PORT.unpack(port)[0]))
        data = rest
    if data:
        raise BadInvite("an invite with something after its end")
    return tuple(addresses)


def _host_text(kind: int, host: bytes) -> str:
    if kind in (4, 6):
        return str(ipaddress.ip_address(host))
    text = host.decode("ascii", errors="replace")
    if not all(character.isalnum() or character in "-._" for character in text) or not text.isascii():
        raise BadInvite("an invite with a host name that is none")
    return text


def _to_text(data: bytes) -> str:
    bits = int.from_bytes(data) << (-len(data) * 8 % 5)
    length = (len(data) * 8 + 4) // 5
    return "".join(_ALPHABET[bits >> 5 * place & 31] for place in range(length - 1, -1, -1))


def _from_text(text: str) -> bytes:
    bits = 0
    for character in text:
        if character not in _DIGITS:
            raise BadInvite(f"an invite does not contain {character!r}")
        bits = bits << 5 | _DIGITS[character]
    spare = len(text) * 5 % 8
    if spare >= 5 or bits & ((1 << spare) - 1):
        raise BadInvite("this invite was altered or cut short; copy it again")
    return (bits >> spare).to_bytes(len(text) * 5 // 8)


# ---------------------------------------------------------------- the issuer's book


class InviteRefusal(enum.StrEnum):
    """Why an invite lets nobody in. Stable: counted under these names, and told to whoever tried."""

    UNKNOWN = "unknown invite"
    WRONG_SECRET = "wrong invite secret"  # noqa: S105 - a reason, not a secret
    EXPIRED = "invite expired"
    USED_UP = "invite used up"
    WITHDRAWN = "invite withdrawn"


class IssuedInvite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What its issuer knows of an invite. The secret itself is here, because a proof is checked with it."""

    swarm: SwarmId
    invite_id: Annotated[bytes, Meta(min_length=INVITE_ID_BYTES, max_length=INVITE_ID_BYTES)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    trust: Trust
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    expires_at_s: Annotated[int, Meta(ge=0, lt=MAX_EXPIRY_S)]
    redeemed_by: Annotated[tuple[NodeId, ...], Meta(max_length=2 * MAX_USES)] = ()
    is_withdrawn: bool = False

    def __repr__(self) -> str:
        return f"<IssuedInvite {self.invite_id.hex()} {self.trust}, {self.uses_left} of {self.uses} uses left>"

    @property
    def uses_left(self) -> int:
        return max(0, self.uses - len(self.redeemed_by))

    def refusal(self, ticket: PresentedTicket, now_s: float) -> InviteRefusal | None:
        """Only who knows the secret is told more than that it is wrong."""
        if not ticket.is_proven_by(self.secret):
            return InviteRefusal.WRONG_SECRET
        if self.is_withdrawn:
            return InviteRefusal.WITHDRAWN
        if now_s >= self.expires_at_s:
            return InviteRefusal.EXPIRED
        return None if self.uses_left else InviteRefusal.USED_UP


class InviteBook:
    """All invites of one issuer; a value. Two books merge into one that forgets no use, whoever wrote last."""

    def __init__(self, invites: Iterable[IssuedInvite] = ()) -> None:
        self._invites = {invite.invite_id: invite for invite in invites}

    def __repr__(self) -> str:
        return f"<InviteBook {list(self._invites.values())}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InviteBook) and self._invites == other._invites

    __hash__ = None  # type: ignore[assignment]

    def invites(self) -> tuple[IssuedInvite, ...]:
        return tuple(self._invites[invite_id] for invite_id in sorted(self._invites))

    def find(self, invite_id: bytes) -> IssuedInvite | None:
        return self._invites.get(invite_id)

    def with_invite(self, invite: IssuedInvite, now_s: float) -> "InviteBook":
        """Raises BadRequest where there are too many. Those that expired long ago are forgotten."""
        kept = [each for each in self._invites.values() if now_s < each.expires_at_s + KEPT_AFTER_EXPIRY_S]
        if len(kept) >= MAX_INVITES:
            raise BadRequest(f"there are {MAX_INVITES} invites already; wait until some are forgotten")
        return InviteBook([*kept, invite])

    def refusal(self, ticket: PresentedTicket, now_s: float) -> InviteRefusal | None:
        """None: the ticket is good. `now_s`: the issuer's wall clock, as Unix time."""
        invite = self._invites.get(ticket.invite_id)
        return InviteRefusal.UNKNOWN if invite is None else invite.refusal(ticket, now_s)

    def with_use(self, invite_id: bytes, node: bytes) -> "InviteBook":
        invite = self._invites[invite_id]
        return self._with(msgspec.structs.replace(invite, redeemed_by=tuple(sorted({*invite.redeemed_by, node}))))

    def with_withdrawal(self, invite_id: bytes) -> "InviteBook":
        return self._with(msgspec.structs.replace(self._invites[invite_id], is_withdrawn=True))

    def merged(self, other: "InviteBook") -> "InviteBook":
        book = self
        for theirs in other.invites():
            ours = book.find(theirs.invite_id)
            book = book._with(theirs if ours is None else _merge(ours, theirs))
        return book

    def _with(self, invite: IssuedInvite) -> "InviteBook":
        return InviteBook({**self._invites, invite.invite_id: invite}.values())


def _merge(ours: IssuedInvite, theirs: IssuedInvite) -> IssuedInvite:
    return msgspec.structs.replace(
        ours,
        redeemed_by=tuple(sorted({*ours.redeemed_by, *theirs.redeemed_by})),
        is_withdrawn=ours.is_withdrawn or theirs.is_withdrawn,
    )
