"""Signed statements: bytes with the key that vouches for them, for records that travel from hand to hand.

Knows nothing of what is stated. The kind is part of what is signed, so that one kind of statement cannot be passed off as another.
"""

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from potluck.identity.keys import NodeKey

MAX_STATEMENT_BYTES = 64 << 10
_DOMAIN = b"potluck/signed\0"

Kind = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"\A[a-z0-9_-]+\Z")]  # it stands in logs


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`payload` as `signer` stated it; believe it only where `is_authentic`."""

    kind: Kind
    payload: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]
    signer: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]

    @property
    def is_authentic(self) -> bool:
        # Here, so that a worker, which knows the messages and checks no signature, carries no cryptography.
        from potluck.identity.keys import verify

        return verify(self.signer, self.signature, _statement(self.kind, self.payload))


def sign(key: "NodeKey", kind: str, payload: bytes) -> Signed:
    return Signed(kind, payload, key.node_id, key.sign(_statement(kind, payload)))


def _statement(kind: str, payload: bytes) -> bytes:
    return _DOMAIN + kind.encode() + b"\0" + payload
