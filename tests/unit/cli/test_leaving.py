"""What `potluck leave --forget` leaves behind of a swarm, and what the next swarm's node finds of it: nothing."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from potluck.cli.main import run
from potluck.cli.swarm_up import _own_swarm, _redeem
from potluck.identity.keys import NodeKey
from potluck.net.tls import TlsTransport
from potluck.node.identity_file import own_folder, own_key, own_run_file, own_swarm_file
from potluck.node.node import Node
from potluck.node.run_file import RunningNode
from potluck.swarm.peers_file import PeersFile
from potluck.trust.admission import Admission
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.records import Trust
from potluck.trust.swarm_file import SwarmFile
from potluck.weights.store import ModelStore
from tests.support.link_ends import run_test

FOUNDER, OLD_FRIEND = (NodeKey.from_seed(bytes([number]) * 32) for number in (1, 2))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose node has met somebody."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    own_key()
    write_peers()


def write_peers() -> None:
    PeersFile(own_folder() / "peers").save([(OLD_FRIEND.node_id, ("10.0.0.9:7475",))])


def knows_somebody() -> bool:
    return bool(PeersFile(own_folder() / "peers").load())


def test_with_the_swarm_its_members_are_forgotten() -> None:
    SwarmKeeper.found(own_key(), own_swarm_file())
    assert run(["leave", "--forget"]) == 0
    assert own_swarm_file().read() is None
    assert not knows_somebody()


def end_slowly(server: socket.socket) -> None:
    """A node that is asked to leave: it answers, and at its end it writes down once more whom it knows."""
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"drained":true}')
    deadline_s = time.monotonic() + 0.3
    while own_swarm_file().read() is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    write_peers()
    (own_folder() / "node.run").unlink()


def test_also_what_a_node_writes_down_at_its_end_is_forgotten() -> None:
    SwarmKeeper.found(own_key(), own_swarm_file())
    with own_run_file().held(), socket.create_server(("127.0.0.1", 0)) as server:
        own_run_file().write(RunningNode(1, "aa", "bb", (), f"127.0.0.1:{server.getsockname()[1]}"))
        ending = threading.Thread(target=end_slowly, args=(server,))
        ending.start()
        assert run(["leave", "--forget"]) == 0
        ending.join()
    assert not knows_somebody()


def test_without_the_word_they_are_found_again() -> None:
    SwarmKeeper.found(own_key(), own_swarm_file())
    options: Any = type("Options", (), {"model": None, "serves": False, "name": ""})
    _own_swarm(own_key(), ModelStore(own_folder() / "models"), options)
    assert knows_somebody()


def test_who_founds_a_swarm_knows_nobody_of_another() -> None:
    options: Any = type("Options", (), {"model": None, "serves": False, "name": ""})
    _own_swarm(own_key(), ModelStore(own_folder() / "models"), options)
    assert not knows_somebody()


def test_who_joins_a_swarm_knows_nobody_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        admission = Admission(keeper, time.time)
        founder = Node(FOUNDER, TlsTransport(FOUNDER, admission), admission)
        address = await founder.listen("127.0.0.1:0")
        now_s = time.time()
        invite = keeper.invite(Trust.MEMBER, 1, int(now_s) + 60, (address,), now_s)
        await _redeem(own_key(), invite)
        await founder.stop()
        assert not knows_somebody()
        write_peers()  # of this swarm, from now on
        await _redeem(own_key(), invite)
        assert knows_somebody()

    run_test(main())
