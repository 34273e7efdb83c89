"""Statements that nobody can alter, and whose kind is a plain word."""

import msgspec
import pytest

from potluck.identity.keys import NodeKey
from potluck.identity.signed import Signed, sign


def test_a_statement_is_believed_for_its_kind_payload_and_signer_only() -> None:
    key, other = NodeKey.generate(), NodeKey.generate()
    signed = sign(key, "member", b"payload")
    assert signed.is_authentic
    changed = [
        msgspec.structs.replace(signed, kind="advert"),
        msgspec.structs.replace(signed, payload=b"payloae"),
        msgspec.structs.replace(signed, signer=other.node_id),
        msgspec.structs.replace(signed, signature=bytes(64)),
        Signed("membe", b"r\0payload", signed.signer, signed.signature),
    ]
    assert not any(statement.is_authentic for statement in changed)


@pytest.mark.parametrize("kind", ["", "x" * 33, "\x1b[2Jx", "member\n", "forged\nWARNING all is lost", "Müll"])
def test_a_kind_is_a_word_that_a_log_can_hold(kind: str) -> None:
    signed = msgspec.structs.replace(sign(NodeKey.generate(), "member", b"payload"), kind=kind)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=Signed)
