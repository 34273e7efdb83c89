"""The handshake without a network: who is who, what is signed, what a reply from elsewhere is worth."""

import pytest

from potluck.core.errors import PeerRefused, ProtocolViolation, WrongPeer
from potluck.identity.keys import NodeKey
from potluck.wire.handshake import (
    AUTH_BYTES,
    HELLO_BYTES,
    VERDICT_BYTES,
    AccepterHandshake,
    DialerHandshake,
    PresentedTicket,
    Ticket,
)
from potluck.wire.messages import PROTOCOL_VERSION

ACCEPTER, DIALER, OTHER = (NodeKey.from_seed(bytes([number]) * 32) for number in range(3))
NONCE, NONCE_2, NONCE_3 = (bytes([number]) * 32 for number in (10, 11, 12))


def pair(expected: bytes | None = ACCEPTER.node_id) -> tuple[AccepterHandshake, DialerHandshake]:
    return AccepterHandshake(ACCEPTER, NONCE), DialerHandshake(DIALER, expected, NONCE_2)


TICKET = Ticket(b"\x07" * 8, b"secret of sixteen"[:16])


def test_a_ticket_is_proven_without_its_secret() -> None:
    accepter = AccepterHandshake(ACCEPTER, NONCE)
    dialer = DialerHandshake(DIALER, ACCEPTER.node_id, NONCE_2, TICKET)
    auth = dialer.auth(accepter.hello)
    assert TICKET.secret not in auth
    assert len(auth) == AUTH_BYTES
    assert accepter.check_auth(auth) == DIALER.node_id
    assert accepter.ticket is not None
    assert accepter.ticket.invite_id == TICKET.invite_id
    assert accepter.ticket.is_proven_by(TICKET.secret)
    assert not accepter.ticket.is_proven_by(b"another of sixteen"[:16])


def test_without_a_ticket_there_is_none() -> None:
    accepter, dialer = pair()
    accepter.check_auth(dialer.auth(accepter.hello))
    assert accepter.ticket is None


def test_a_proof_cannot_be_used_by_somebody_else_or_somewhere_else() -> None:
    """Whoever saw it on the wire can sign a new AUTH around it, with its own key; the proof names the dialer and both nonces."""
    accepter = AccepterHandshake(ACCEPTER, NONCE)
    seen = DialerHandshake(DIALER, None, NONCE_2, TICKET).auth(accepter.hello)
    proofs = [accepter.check_auth(seen) and accepter.ticket]
    for thief, nonce, dialer_nonce in ((OTHER, NONCE, NONCE_2), (DIALER, NONCE_3, NONCE_2), (DIALER, NONCE, NONCE_3)):
        later = AccepterHandshake(ACCEPTER, nonce)
        own = DialerHandshake(thief, None, dialer_nonce, TICKET).auth(later.hello)
        later.check_auth(own)
        proofs.append(later.ticket)
    assert all(each and each.is_proven_by(TICKET.secret) for each in proofs)
    first = proofs[0]
    assert first
    for other in proofs[1:]:
        assert other
        assert not PresentedTicket(first.invite_id, first.proof, other.statement).is_proven_by(TICKET.secret)


def test_every_flipped_bit_of_an_auth_with_a_ticket_is_found() -> None:
    accepter = AccepterHandshake(ACCEPTER, NONCE)
    auth = DialerHandshake(DIALER, ACCEPTER.node_id, NONCE_2, TICKET).auth(accepter.hello)
    for place in range(72, len(auth)):
        bad = bytearray(auth)
        bad[place] ^= 1 << (place % 8)
        with pytest.raises(ProtocolViolation):
            accepter.check_auth(bytes(bad))
        assert accepter.ticket is None


def test_welcome() -> None:
    accepter, dialer = pair()
    auth = dialer.auth(accepter.hello)
    assert accepter.check_auth(auth) == DIALER.node_id
    verdict = accepter.verdict(None)
    dialer.check_verdict(verdict)
    assert dialer.accepter == ACCEPTER.node_id
    assert (len(accepter.hello), len(auth), len(verdict)) == (HELLO_BYTES, AUTH_BYTES, VERDICT_BYTES)


def test_anybody_is_accepted_where_nobody_is_expected() -> None:
    accepter, dialer = pair(None)
    accepter.check_auth(dialer.auth(accepter.hello))
    dialer.check_verdict(accepter.verdict(None))
    assert dialer.accepter == ACCEPTER.node_id


def test_refusal_carries_its_reason() -> None:
    accepter, dialer = pair()
    accepter.check_auth(dialer.auth(accepter.hello))
    with pytest.raises(PeerRefused) as caught:
        dialer.check_verdict(accepter.verdict("not a member\n" + "x" * 100))
    assert caught.value.reason == "not a member?" + "x" * 51


def test_wrong_accepter_gets_no_signature() -> None:
    accepter, _ = pair()
    with pytest.raises(WrongPeer):
        DialerHandshake(DIALER, OTHER.node_id, NONCE_2).auth(accepter.hello)


def test_accepter_without_the_key_is_found_out() -> None:
    """Somebody who claims ACCEPTER's id in HELLO cannot sign the verdict."""
    accepter, dialer = pair()
    accepter.check_auth(dialer.auth(accepter.hello))
    impostor = AccepterHandshake(OTHER, NONCE)
    impostor._statement = accepter._statement
    with pytest.raises(WrongPeer):
        dialer.check_verdict(impostor.verdict(None))


def test_every_flipped_bit_of_auth_is_found() -> None:
    accepter, dialer = pair()
    auth = dialer.auth(accepter.hello)
    for place in range(len(auth)):
        if place in (6, 7):  # padding
            continue
        bad = bytearray(auth)
        bad[place] ^= 1 << (place % 8)
        with pytest.raises(ProtocolViolation):
            accepter.check_auth(bytes(bad))


def test_every_flipped_bit_of_the_verdict_is_found() -> None:
    accepter, dialer = pair()
    accepter.check_auth(dialer.auth(accepter.hello))
    verdict = accepter.verdict(None)
    for place in range(len(verdict)):
        bad = bytearray(verdict)
        bad[place] ^= 1 << (place % 8)
        with pytest.raises((ProtocolViolation, WrongPeer)):
            dialer.check_verdict(bytes(bad))


def test_replayed_auth_is_worth_nothing_with_a_new_nonce() -> None:
    accepter, dialer = pair()
    auth = dialer.auth(accepter.hello)
    with pytest.raises(ProtocolViolation, match="signature"):
        AccepterHandshake(ACCEPTER, NONCE_3).check_auth(auth)


def test_auth_for_one_node_is_worth_nothing_at_another() -> None:
    """A node that was dialled cannot pass the dialer's signature on."""
    _, dialer = pair(None)
    auth = dialer.auth(AccepterHandshake(OTHER, NONCE).hello)
    with pytest.raises(ProtocolViolation, match="signature"):
        AccepterHandshake(ACCEPTER, NONCE).check_auth(auth)


def test_other_versions_and_protocols_are_named() -> None:
    accepter, dialer = pair()
    newer = accepter.hello[:4] + (PROTOCOL_VERSION + 1).to_bytes(2, "little") + accepter.hello[6:]
    with pytest.raises(ProtocolViolation, match=f"version {PROTOCOL_VERSION + 1}"):
        dialer.auth(newer)
    with pytest.raises(ProtocolViolation, match="does not speak"):
        dialer.auth(b"HTTP" + accepter.hello[4:])


def test_keys_that_belong_to_nobody_are_refused() -> None:
    """Under a point of small order, here the neutral one, this signature fits every statement."""
    accepter, dialer = pair()
    auth = bytearray(dialer.auth(accepter.hello))
    for key in (bytes(32), b"\x01" + bytes(31), b"\x01" + bytes(30) + b"\x80"):
        auth[8:40] = key
        auth[-64:] = b"\x01" + bytes(63)
        with pytest.raises(ProtocolViolation):
            accepter.check_auth(bytes(auth))
