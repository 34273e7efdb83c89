"""A node's identity: one Ed25519 key in a file that only its owner can read. Knows nothing of members or of the network."""

import contextlib
import os
import tempfile
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from potluck.core.errors import BadKeyFile
from potluck.identity.private_file import privacy_complaint

NODE_ID_BYTES = 32
SIGNATURE_BYTES = 64
_MAX_FILE_BYTES = 4096
_WAY_OUT = "restore it from a backup, or become a new machine to others: potluck leave --forget --new-key"
# Points of small order, with the sign bit cleared: under such a "key" anybody can make signatures that OpenSSL accepts.
_SMALL_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


class NodeKey:
    """The private key of one node. `node_id` is the public one: 32 bytes that name the node everywhere."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.node_id = private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<NodeKey {short_id(self.node_id)}>"

    @classmethod
    def generate(cls) -> "NodeKey":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "NodeKey":
        """The key that 32 bytes determine; for tests and simulations."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
        return self._private.sign(data)

    def private_pem(self) -> bytes:
        """The secret itself, for the key's file and for TLS."""
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def private(self) -> Ed25519PrivateKey:
        return self._private


def verify(node_id: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the node signed the data. False for anything malformed too."""
    if len(node_id) != NODE_ID_BYTES or node_id[:-1] + bytes([node_id[-1] & 0x7F]) in _SMALL_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(node_id).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def short_id(node_id: bytes) -> str:
    """Eight characters for people and logs; never for decisions."""
    return node_id[:4].hex()


def load_or_create_key(path: Path) -> NodeKey:
    """The key in this file, which is made when missing. Raises BadKeyFile when it is unreadable or open to others."""
    with contextlib.suppress(FileNotFoundError):
        return load_key(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _create(path, NodeKey.generate().private_pem())
    return load_key(path)  # perhaps another process's, which was faster


def load_key(path: Path) -> NodeKey:
    """The key in this file. Raises FileNotFoundError or BadKeyFile."""
    try:
        with path.open("rb") as file:
            complaint = privacy_complaint(path, os.fstat(file.fileno()))
            data = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadKeyFile(f"{path}: cannot be read: {error.strerror}") from error
    if complaint is not None:
        raise BadKeyFile(f"{path}: {complaint}")
    try:
        private = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadKeyFile(f"{path}: does not hold a private key; {_WAY_OUT}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise BadKeyFile(f"{path}: holds another kind of key than Ed25519; {_WAY_OUT}")
    return NodeKey(private)


def _create(path: Path, data: bytes) -> None:
    """The whole file or none, and never over another: a link to a finished file appears in one step."""
    handle, temporary = tempfile.mkstemp(prefix=".new-key-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
