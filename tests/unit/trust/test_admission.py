"""Admission in the handshake, over every kind of network: who gets a link, who is turned away, and with which reason."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.core.errors import PeerRefused
from potluck.identity.keys import NodeKey, short_id
from potluck.net.link import Link, Listener
from potluck.trust.admission import Admission, AdmissionRefusal
from potluck.trust.invites import Invite, InviteRefusal, decode_invite, encode_invite
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.records import Trust
from potluck.trust.swarm_file import SwarmFile
from potluck.wire.handshake import Ticket
from tests.support.link_ends import ACCEPTER, DIALER, NETS, OTHER, PATIENCE_S, Net, Recorder, run_test
from tests.support.wire_messages import step

NOW_S = 1_800_000_000.0


class Issuer:
    """The founder's door: a listener that asks an Admission, on a wall clock that the test holds."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net = net
        self.keeper = SwarmKeeper.found(ACCEPTER, SwarmFile(folder / "issuer.swarm"))
        self.now_s = NOW_S
        self.admission = Admission(self.keeper, lambda: self.now_s)
        self.handler = Recorder()
        self.listener: Listener | None = None

    async def listen(self) -> None:
        self.listener = await self.net.transport(ACCEPTER, self.admission).listen("127.0.0.1:0", self.handler)

    def invite(self, trust: Trust = Trust.MEMBER, uses: int = 1, lasts_s: int = 60) -> Invite:
        return self.keeper.invite(trust, uses, int(self.now_s) + lasts_s, ("127.0.0.1:1",), self.now_s)

    async def dial(self, key: NodeKey, ticket: Ticket | None = None) -> Link:
        assert self.listener
        transport = self.net.transport(key)
        return await transport.dial(self.listener.address, ACCEPTER.node_id, Recorder(), PATIENCE_S, ticket)

    async def refusal(self, key: NodeKey, ticket: Ticket | None = None) -> str:
        with pytest.raises(PeerRefused) as caught:
            await self.dial(key, ticket)
        return caught.value.reason

    def close(self) -> None:
        assert self.listener
        self.listener.close()


@pytest.fixture(params=list(NETS))
def issuer(request: pytest.FixtureRequest, tmp_path: Path) -> Issuer:
    return Issuer(NETS[request.param](), tmp_path)


def test_an_invite_makes_a_member_and_the_link_is_an_ordinary_one(issuer: Issuer) -> None:
    async def main() -> None:
        await issuer.listen()
        invite = decode_invite(encode_invite(issuer.invite(Trust.TRUSTED)))
        link = await issuer.dial(DIALER, invite.ticket)
        link.send(step(), b"hello")
        await issuer.handler.until_count(1)
        assert issuer.keeper.roster.trust_of(DIALER.node_id) is Trust.TRUSTED
        assert SwarmKeeper(ACCEPTER, issuer.keeper._file).roster == issuer.keeper.roster
        link.close()
        again = await issuer.dial(DIALER)  # from now on without
        again.close()
        assert issuer.admission.redeemed == 1
        assert not issuer.admission.refusals
        issuer.close()

    run_test(main())


def test_each_refusal_has_its_reason_its_line_in_the_log_and_its_count(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reasons: list[str] = []

    async def refused(ticket: Ticket | None) -> None:
        reasons.append(await issuer.refusal(OTHER, ticket))

    async def main() -> None:
        await issuer.listen()
        used, expiring, open_one, withdrawn = (
            issuer.invite(),
            issuer.invite(lasts_s=1),
            issuer.invite(),
            issuer.invite(),
        )
        (await issuer.dial(DIALER, used.ticket)).close()
        issuer.now_s += 1
        issuer.keeper.withdraw(withdrawn.invite_id)
        await refused(None)
        await refused(used.ticket)
        await refused(expiring.ticket)
        await refused(Ticket(open_one.invite_id, bytes(16)))
        await refused(Ticket(b"\xff" * 8, open_one.secret))  # of another swarm, say
        await refused(withdrawn.ticket)
        issuer.keeper.expel(OTHER.node_id)
        await refused(open_one.ticket)
        assert not issuer.keeper.roster.is_member(OTHER.node_id)
        assert issuer.keeper.book.find(open_one.invite_id).uses_left == 1  # type: ignore[union-attr]
        issuer.close()

    run_test(main())
    assert reasons == [
        AdmissionRefusal.NOT_A_MEMBER,
        InviteRefusal.USED_UP,
        InviteRefusal.EXPIRED,
        InviteRefusal.WRONG_SECRET,
        InviteRefusal.UNKNOWN,
        InviteRefusal.WITHDRAWN,
        AdmissionRefusal.EXPELLED,
    ]
    assert issuer.admission.refusals == dict.fromkeys(reasons, 1)
    for reason in reasons:
        assert f"node {short_id(OTHER.node_id)} was turned away: {reason}" in caplog.messages


def test_a_member_is_let_in_though_its_ticket_is_worth_nothing(issuer: Issuer) -> None:
    """The first attempt went through and its answer was lost: the newcomer simply tries again."""

    async def main() -> None:
        await issuer.listen()
        invite = issuer.invite()
        for _ in range(2):
            (await issuer.dial(DIALER, invite.ticket)).close()
        assert issuer.admission.redeemed == 1
        issuer.close()

    run_test(main())


def test_an_invite_for_three_lets_three_in(issuer: Issuer) -> None:
    async def main() -> None:
        await issuer.listen()
        invite = issuer.invite(uses=3)
        keys = [NodeKey.from_seed(bytes([number]) * 32) for number in range(50, 54)]
        for key in keys[:3]:
            (await issuer.dial(key, invite.ticket)).close()
        assert await issuer.refusal(keys[3], invite.ticket) == InviteRefusal.USED_UP
        assert len(issuer.keeper.roster.members()) == 4
        issuer.close()

    run_test(main())


def test_a_book_that_cannot_be_written_lets_nobody_in(issuer: Issuer) -> None:
    async def main() -> None:
        await issuer.listen()
        invite = issuer.invite()
        path = issuer.keeper._file.path
        whole = path.read_bytes()
        path.write_bytes(b"torn")
        assert await issuer.refusal(DIALER, invite.ticket) == AdmissionRefusal.CANNOT_SAVE
        assert not issuer.keeper.roster.is_member(DIALER.node_id)
        path.write_bytes(whole)
        (await issuer.dial(DIALER, invite.ticket)).close()
        issuer.close()

    run_test(main())


def test_an_issuer_that_lost_its_right_lets_nobody_in(tmp_path: Path) -> None:
    founder = SwarmKeeper.found(ACCEPTER, SwarmFile(tmp_path / "founder.swarm"))
    invite = founder.invite(Trust.MEMBER, 1, int(NOW_S) + 60, (), NOW_S)
    delegate = SwarmKeeper.join(DIALER, SwarmFile(tmp_path / "delegate.swarm"), invite)
    founder.admit(DIALER.node_id, Trust.MEMBER, may_invite=True)
    delegate.take_all(founder.roster.records())
    offered = delegate.invite(Trust.MEMBER, 1, int(NOW_S) + 60, (), NOW_S)
    founder.admit(DIALER.node_id, Trust.MEMBER)
    delegate.take_all(founder.roster.records())
    admission = Admission(delegate, lambda: NOW_S)
    refusal = admission(OTHER.node_id, offered.ticket.present(b"a connection"))
    assert refusal == AdmissionRefusal.ISSUER_MAY_NOT_INVITE
    assert admission.refusals == {refusal: 1}


@pytest.mark.parametrize("clock", [time.time, lambda: NOW_S], ids=["real", "held"])
def test_strangers_cost_little(tmp_path: Path, clock: Callable[[], float]) -> None:
    """A refusal writes nothing."""
    keeper = SwarmKeeper.found(ACCEPTER, SwarmFile(tmp_path / "issuer.swarm"))
    stamp = keeper._file.stamp
    admission = Admission(keeper, clock)
    for number in range(200):
        admission(number.to_bytes(32), Ticket(b"\x01" * 8, bytes(16)).present(b"x") if number % 2 else None)
    assert keeper._file.stamp == stamp
    assert sum(admission.refusals.values()) == 200
