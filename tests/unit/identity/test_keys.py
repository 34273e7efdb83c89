"""Keys on disk: made once, private, refused when they are not."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.core.errors import BadKeyFile
from potluck.identity.keys import NodeKey, load_key, load_or_create_key, short_id, verify


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    key = load_or_create_key(path)
    assert load_or_create_key(path).node_id == key.node_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["node.key"]


def test_a_key_made_meanwhile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.key"
    made = load_or_create_key(path)
    real_link = os.link
    path.rename(tmp_path / "aside")

    def late(source: str, target: Path) -> None:
        (tmp_path / "aside").rename(target)
        real_link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert load_or_create_key(path).node_id == made.node_id
    assert os.listdir(tmp_path) == ["node.key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_open_permissions_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    load_or_create_key(path)
    path.chmod(mode)
    with pytest.raises(BadKeyFile, match="chmod 600"):
        load_or_create_key(path)


@pytest.mark.parametrize(
    "content", [b"", b"rubbish", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", b"\xff" * 9000]
)
def test_rubbish_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadKeyFile, match=r"restore it from a backup, or .*: potluck leave --forget --new-key"):
        load_or_create_key(path)
    assert path.read_bytes() == content


def test_other_kinds_of_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(X25519PrivateKey.generate().private_bytes(encoding, form, serialization.NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(BadKeyFile, match="Ed25519"):
        load_key(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadKeyFile):
        load_key(tmp_path)


def test_missing_key_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_key(tmp_path / "none")


def test_signatures() -> None:
    key = NodeKey.from_seed(bytes(32))
    signature = key.sign(b"data")
    assert len(signature) == 64
    assert len(key.node_id) == 32
    assert verify(key.node_id, signature, b"data")
    assert not verify(key.node_id, signature, b"date")
    assert not verify(NodeKey.generate().node_id, signature, b"data")
    assert not verify(b"short", signature, b"data")
    assert not verify(key.node_id, b"short", b"data")


def test_a_key_prints_no_secret() -> None:
    key = NodeKey.from_seed(bytes(range(32)))
    assert repr(key) == f"<NodeKey {short_id(key.node_id)}>"
    assert len(short_id(key.node_id)) == 8
