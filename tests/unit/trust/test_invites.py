"""Invites: the string survives copying and nothing else; the book forgets no use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import BadInvite, BadRequest, PotluckError
from potluck.trust.invites import (
    KEPT_AFTER_EXPIRY_S,
    MAX_INVITES,
    Invite,
    InviteBook,
    InviteRefusal,
    IssuedInvite,
    decode_invite,
    encode_invite,
)
from potluck.trust.records import Trust
from potluck.wire.handshake import PresentedTicket, Ticket

SWARM, ISSUER, ID, SECRET = b"s" * 16, b"i" * 32, b"\x01" * 8, b"k" * 16
NOW_S = 1_800_000_000.0
ADDRESSES = ("192.168.0.7:7475", "[2001:db8::1]:7475", "attic.example:80")
INVITE = Invite(SWARM, ISSUER, ID, SECRET, int(NOW_S) + 3600, ADDRESSES)


def test_an_invite_survives_its_string() -> None:
    text = encode_invite(INVITE)
    assert decode_invite(text) == INVITE
    assert text.startswith("potluck-")
    assert text.isascii()
    assert not set(text.removeprefix("potluck-")) & set("ilou")
    assert len(encode_invite(INVITE._replace(addresses=ADDRESSES[:1]))) <= 160


def test_copying_by_mail_or_by_hand_does_no_harm() -> None:
    text = encode_invite(INVITE)
    folded = "\n  ".join(text[start : start + 40] for start in range(0, len(text), 40))
    assert decode_invite(f"  {folded}\n") == INVITE
    assert decode_invite(text.upper()) == INVITE
    body = text.removeprefix("potluck-")
    assert decode_invite("potluck-" + body.replace("0", "o").replace("1", "l")) == INVITE


def test_every_single_wrong_character_is_found() -> None:
    text = encode_invite(INVITE)
    for place in range(len("potluck-"), len(text)):
        other = "7" if text[place] != "7" else "8"
        with pytest.raises(BadInvite):
            decode_invite(text[:place] + other + text[place + 1 :])


def test_a_text_of_absurd_length_is_not_looked_at() -> None:
    with pytest.raises(BadInvite):
        decode_invite("potluck-" + "0" * 10_000_000)


def test_every_shorter_or_longer_string_is_found() -> None:
    text = encode_invite(INVITE)
    for end in range(len(text)):
        with pytest.raises(BadInvite):
            decode_invite(text[:end])
    for more in ("0", "00", "0" * 8, "7" * 16):
        with pytest.raises(BadInvite):
            decode_invite(text + more)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=300) | st.text("0123456789abcdefghjkmnpqrstvwxyz", max_size=300))
def test_rubbish_is_a_typed_error(text: str) -> None:
    for attempt in (text, "potluck-" + text):
        with pytest.raises(BadInvite):
            decode_invite(attempt)


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,60})", fullmatch=True)
HOSTS = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda ip: f"[{ip}]") | NAMES


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        Invite, st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32),
        st.binary(min_size=8, max_size=8).filter(any), st.binary(min_size=16, max_size=16), st.integers(0, (1 << 40) - 1),
        st.lists(st.builds(lambda host, port: f"{host}:{port}", HOSTS, st.integers(0, 65535)), max_size=8).map(tuple),
    )
)  # fmt: skip
def test_all_invites_survive_their_strings(invite: Invite) -> None:
    assert decode_invite(encode_invite(invite)) == invite


@pytest.mark.parametrize("addresses", [("no-port",), ("[fe80::1%eth0]:1",), ("a" * 300 + ":1",), ("h:1",) * 9])
def test_addresses_that_do_not_fit(addresses: tuple[str, ...]) -> None:
    with pytest.raises(PotluckError):
        encode_invite(INVITE._replace(addresses=addresses))


# ---------------------------------------------------------------- the book


def issued(number: int = 1, uses: int = 1, expires_at_s: float = NOW_S + 60) -> IssuedInvite:
    return IssuedInvite(SWARM, number.to_bytes(8), SECRET, Trust.MEMBER, uses, int(expires_at_s))


def present(number: int = 1, secret: bytes = SECRET) -> PresentedTicket:
    return Ticket(number.to_bytes(8), secret).present(b"this connection")


def test_each_way_to_fail_has_its_reason() -> None:
    book = InviteBook().with_invite(issued(), NOW_S)
    assert book.refusal(present(), NOW_S) is None
    assert book.refusal(present(2), NOW_S) is InviteRefusal.UNKNOWN
    assert book.refusal(present(secret=b"x" * 16), NOW_S) is InviteRefusal.WRONG_SECRET
    assert book.refusal(present(), NOW_S + 60) is InviteRefusal.EXPIRED
    assert book.with_use((1).to_bytes(8), ISSUER).refusal(present(), NOW_S) is InviteRefusal.USED_UP
    assert book.with_withdrawal((1).to_bytes(8)).refusal(present(), NOW_S) is InviteRefusal.WITHDRAWN


def test_only_who_knows_the_secret_learns_that_an_invite_has_expired() -> None:
    book = InviteBook().with_invite(issued(), NOW_S)
    assert book.refusal(present(secret=b"x" * 16), NOW_S + 60) is InviteRefusal.WRONG_SECRET


def test_a_proof_is_good_for_one_connection() -> None:
    here = Ticket(ID, SECRET).present(b"this connection")
    there = PresentedTicket(here.invite_id, here.proof, b"another connection")
    assert here.is_proven_by(SECRET)
    assert not there.is_proven_by(SECRET)


def test_an_invite_has_as_many_uses_as_it_says() -> None:
    book = InviteBook().with_invite(issued(uses=3), NOW_S)
    for number in range(3):
        assert book.refusal(present(), NOW_S) is None
        book = book.with_use((1).to_bytes(8), bytes([number]) * 32)
    assert book.refusal(present(), NOW_S) is InviteRefusal.USED_UP


def test_merged_books_forget_no_use() -> None:
    book = InviteBook().with_invite(issued(uses=2), NOW_S)
    one, other = book.with_use((1).to_bytes(8), b"a" * 32), book.with_use((1).to_bytes(8), b"b" * 32)
    assert one.merged(other) == other.merged(one)
    assert one.merged(other).refusal(present(), NOW_S) is InviteRefusal.USED_UP
    assert one.merged(InviteBook()) == InviteBook().merged(one) == one


def test_the_book_is_bounded_and_forgets_what_expired_long_ago() -> None:
    book = InviteBook(issued(number) for number in range(1, MAX_INVITES + 1))
    with pytest.raises(BadRequest):
        book.with_invite(issued(9999), NOW_S)
    later_s = NOW_S + 61 + KEPT_AFTER_EXPIRY_S
    assert len(book.with_invite(issued(9999, expires_at_s=later_s + 9), later_s).invites()) == 1


def test_secrets_are_not_printed() -> None:
    for each in (INVITE, issued(), InviteBook([issued()]), INVITE.ticket):
        assert repr(SECRET) not in repr(each)
        assert SECRET.hex() not in repr(each)
