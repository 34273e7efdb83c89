"""What a node keeps of its swarm: across restarts, torn writes, and commands that write beside the daemon."""

import os
import stat
from pathlib import Path

import pytest

from potluck.core.errors import BadRequest, BadSwarmFile, NotEntitled, RecordRefused
from potluck.identity.keys import NodeKey
from potluck.trust.invites import Invite, InviteRefusal
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.records import Membership, RefusalReason, Trust, state
from potluck.trust.roster import Roster
from potluck.trust.swarm_file import SwarmFile
from potluck.wire.handshake import PresentedTicket

FOUNDER, GUEST, OTHER = (NodeKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
NOW_S = 1_800_000_000.0


@pytest.fixture
def file(tmp_path: Path) -> SwarmFile:
    return SwarmFile(tmp_path / "home" / "node.swarm")


@pytest.fixture
def keeper(file: SwarmFile) -> SwarmKeeper:
    return SwarmKeeper.found(FOUNDER, file, "home")


def invite(keeper: SwarmKeeper, trust: Trust = Trust.MEMBER, uses: int = 1) -> Invite:
    return keeper.invite(trust, uses, int(NOW_S) + 60, ("127.0.0.1:1",), NOW_S)


def present(invite: Invite, guest: NodeKey = GUEST) -> PresentedTicket:
    return invite.ticket.present(b"connection of " + guest.node_id)


def test_restarting_loses_nothing(keeper: SwarmKeeper, file: SwarmFile) -> None:
    first, second = invite(keeper), invite(keeper, uses=5)
    assert keeper.redeem(GUEST.node_id, present(first), NOW_S) is None
    keeper.admit(OTHER.node_id, Trust.TRUSTED, may_invite=True)
    keeper.serve_model("m", "a" * 64)
    again = SwarmKeeper(FOUNDER, file)
    assert again.roster == keeper.roster
    assert again.roster.trust_of(GUEST.node_id) is Trust.MEMBER
    assert [model.subject for model in again.roster.models()] == ["m"]
    assert again.redeem(OTHER.node_id, present(first, OTHER), NOW_S) is InviteRefusal.USED_UP
    assert again.book.refusal(present(second, OTHER), NOW_S) is None


def test_the_file_is_private(keeper: SwarmKeeper, file: SwarmFile) -> None:
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    os.chmod(file.path, 0o644)
    with pytest.raises(BadSwarmFile, match="can be read by others"):
        SwarmKeeper(FOUNDER, file)


def test_every_torn_or_altered_file_is_an_error_that_names_it(keeper: SwarmKeeper, file: SwarmFile) -> None:
    whole = file.path.read_bytes()
    damaged = [whole[:end] for end in range(0, len(whole), 7)]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(0, len(whole), 11)]
    for data in [*damaged, whole + b" ", bytes(len(whole))]:
        file.path.write_bytes(data)
        with pytest.raises(BadSwarmFile, match=str(file.path)):
            SwarmKeeper(FOUNDER, file)
        with pytest.raises(BadSwarmFile):
            SwarmKeeper.found(FOUNDER, file)
        assert file.path.read_bytes() == data


def test_a_write_that_fails_leaves_the_old_file(
    keeper: SwarmKeeper, file: SwarmFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.path.read_bytes()

    def no_space(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(BadSwarmFile, match="No space left"):
        keeper.admit(GUEST.node_id, Trust.MEMBER)
    assert not keeper.roster.is_member(GUEST.node_id)  # nothing is true that is not on disk
    assert file.path.read_bytes() == before
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["node.swarm", "node.swarm.lock"]


def test_a_node_belongs_to_one_swarm(keeper: SwarmKeeper, file: SwarmFile) -> None:
    with pytest.raises(BadSwarmFile, match="belongs to a swarm already"):
        SwarmKeeper.found(FOUNDER, file)
    with pytest.raises(BadSwarmFile, match="belongs to a swarm already"):
        SwarmKeeper.join(FOUNDER, file, invite(keeper))
    with pytest.raises(BadSwarmFile, match="is node"):
        SwarmKeeper(GUEST, file)
    with pytest.raises(BadSwarmFile, match="belongs to no swarm"):
        SwarmKeeper(GUEST, SwarmFile(file.path.with_name("other.swarm")))


def test_a_newcomer_trusts_only_its_introducer_until_it_has_heard_the_rest(
    keeper: SwarmKeeper, file: SwarmFile
) -> None:
    joining = invite(keeper)
    guest = SwarmKeeper.join(GUEST, SwarmFile(file.path.with_name("guest.swarm")), joining)
    assert guest.may_link(FOUNDER.node_id)
    assert not guest.may_link(OTHER.node_id)
    keeper.redeem(GUEST.node_id, present(joining), NOW_S)
    keeper.admit(OTHER.node_id, Trust.MEMBER)
    for record in reversed(keeper.roster.records()):
        guest.take(record)
    assert guest.roster == keeper.roster
    assert guest.may_link(OTHER.node_id)
    guest.save_if_changed()
    again = SwarmKeeper(GUEST, SwarmFile(file.path.with_name("guest.swarm")))
    assert again.roster == keeper.roster
    assert (again.introducer, again.introducer_addresses) == (FOUNDER.node_id, joining.addresses)


def test_a_command_and_the_daemon_write_beside_each_other(keeper: SwarmKeeper, file: SwarmFile) -> None:
    changes: list[tuple[Roster, Roster]] = []
    keeper.on_change.append(lambda before, after: changes.append((before, after)))
    command = SwarmKeeper(FOUNDER, file)
    made_by_command = invite(command, uses=2)
    keeper.admit(OTHER.node_id, Trust.MEMBER)
    # The daemon finds an invite that it has not heard of, and neither forgets the other's uses.
    assert keeper.redeem(GUEST.node_id, present(made_by_command), NOW_S) is None
    command.expel(OTHER.node_id)
    assert not keeper.roster.is_expelled(OTHER.node_id)
    keeper.refresh()
    assert keeper.roster.is_expelled(OTHER.node_id)
    assert changes[-1][1] is keeper.roster
    command.refresh()
    assert command.roster == keeper.roster
    assert command.book == keeper.book
    assert [each.uses_left for each in keeper.book.invites()] == [1]


def test_two_processes_cannot_both_spend_the_last_use(keeper: SwarmKeeper, file: SwarmFile) -> None:
    last = invite(keeper)
    twin = SwarmKeeper(FOUNDER, file)
    assert keeper.redeem(GUEST.node_id, present(last), NOW_S) is None
    assert twin.redeem(OTHER.node_id, present(last, OTHER), NOW_S) is InviteRefusal.USED_UP
    assert not twin.roster.is_member(OTHER.node_id)


def test_what_is_refused_is_counted_by_reason(keeper: SwarmKeeper) -> None:
    swarm = keeper.roster.swarm
    keeper.admit(GUEST.node_id, Trust.MEMBER)
    keeper.take(state(GUEST, Membership(swarm, OTHER.node_id, 1, Trust.MEMBER)))
    keeper.take_all([state(OTHER, Membership(swarm, OTHER.node_id, 1, Trust.TRUSTED))])
    with pytest.raises(RecordRefused):
        keeper.take(state(FOUNDER, Membership(bytes(16), OTHER.node_id, 1, Trust.MEMBER)))
    assert keeper.refusals == {
        RefusalReason.NOT_ENTITLED: 1,
        RefusalReason.SIGNER_UNKNOWN: 1,
        RefusalReason.OTHER_SWARM: 1,
    }
    assert not keeper.roster.is_member(OTHER.node_id)


def test_what_is_refused_fills_no_log(keeper: SwarmKeeper, caplog: pytest.LogCaptureFixture) -> None:
    records = [state(OTHER, Membership(keeper.roster.swarm, OTHER.node_id, 1 + n, Trust.TRUSTED)) for n in range(40)]
    keeper.take_all(records)
    assert keeper.refusals[RefusalReason.SIGNER_UNKNOWN] >= 9
    assert len(caplog.messages) == 8


def test_only_who_may_invite_can(keeper: SwarmKeeper, file: SwarmFile) -> None:
    joining = invite(keeper)
    guest = SwarmKeeper.join(GUEST, SwarmFile(file.path.with_name("guest.swarm")), joining)
    with pytest.raises(NotEntitled):
        invite(guest)
    keeper.admit(GUEST.node_id, Trust.MEMBER, may_invite=True)
    guest.take_all(keeper.roster.records())
    with pytest.raises(NotEntitled, match="cannot make others trusted"):
        invite(guest, Trust.TRUSTED)
    good = invite(guest)
    keeper.admit(GUEST.node_id, Trust.MEMBER)
    guest.take_all(keeper.roster.records())
    with pytest.raises(NotEntitled):
        guest.redeem(OTHER.node_id, present(good, OTHER), NOW_S)
    assert guest.book.invites()[0].uses_left == 1


@pytest.mark.parametrize(
    ("uses", "lasts_s", "addresses"),
    [(0, 60, ()), (1 << 20, 60, ()), (1, 0, ()), (1, 1 << 41, ()), (1, 60, ("nonsense",)), (1, 60, ("a:1",) * 9)],
)
def test_invites_that_cannot_be_are_not_promised(
    keeper: SwarmKeeper, file: SwarmFile, uses: int, lasts_s: int, addresses: tuple[str, ...]
) -> None:
    with pytest.raises(BadRequest):
        keeper.invite(Trust.MEMBER, uses, int(NOW_S) + lasts_s, addresses, NOW_S)
    assert keeper.book.invites() == ()
    assert SwarmKeeper(FOUNDER, file).book.invites() == ()


def test_names_that_are_too_long_found_nothing(file: SwarmFile) -> None:
    with pytest.raises(BadRequest):
        SwarmKeeper.found(FOUNDER, file, "x" * 65)
    assert file.read() is None
