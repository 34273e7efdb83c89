"""What a node keeps about the swarm on disk."""

from pathlib import Path

import pytest

from potluck.swarm.incarnation_file import next_incarnation, store_incarnation
from potluck.swarm.peers_file import MAX_PEERS, PeersFile
from tests.support.swarm_records import KEYS

ONE, TWO = KEYS[0].node_id, KEYS[1].node_id


def test_addresses_are_found_again_the_most_recent_first(tmp_path: Path) -> None:
    file = PeersFile(tmp_path / "home" / "peers.json")
    assert file.load() == []
    file.save([(ONE, ("a:1", "b:2"))])
    file.save([(TWO, ("c:3",)), (ONE, ("d:4",))])
    assert [(peer.id, peer.addresses) for peer in file.load()] == [(TWO, ("c:3",)), (ONE, ("d:4",))]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["peers.json"]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    file = PeersFile(tmp_path / "peers.json")
    file.save([(number.to_bytes(32, "big"), ("a:1",)) for number in range(1000)])
    assert len(file.load()) == MAX_PEERS


@pytest.mark.parametrize(
    "content", [b"", b"{", b'[{"node": "zz", "addresses": ["a:1"]}]', b"[" * 100_000, bytes(2 << 20)]
)
def test_a_bad_file_is_only_a_lost_hint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "peers.json").write_bytes(content)
    file = PeersFile(tmp_path / "peers.json")
    assert file.load() == []
    file.save([(ONE, ("a:1",))])
    assert len(file.load()) == 1


def test_each_start_counts_one_more(tmp_path: Path) -> None:
    path = tmp_path / "incarnation"
    assert [next_incarnation(path) for _ in range(3)] == [1, 2, 3]
    store_incarnation(path, 9)
    assert next_incarnation(path) == 10


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"9" * 30, b"9" * 1000])
def test_a_bad_count_starts_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "incarnation"
    path.write_bytes(content)
    assert next_incarnation(path) == 1
