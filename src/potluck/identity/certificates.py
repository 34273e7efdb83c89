"""Self-signed X.509 certificates that carry a node's Ed25519 key through TLS.

Nobody reads their names or dates; only the key counts.
"""

import datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from potluck.core.errors import ProtocolViolation
from potluck.identity.keys import NodeKey, short_id

# A clock that is wrong must not cut a node off, so the dates say nothing.
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
_MAX_CERTIFICATE_BYTES = 16 << 10


def certificate_pem(key: NodeKey) -> bytes:
    """A certificate for this key, signed by itself."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"potluck {short_id(key.node_id)}")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
    )
    return builder.sign(key.private, None).public_bytes(serialization.Encoding.PEM)


def certificate_node_id(der: bytes) -> bytes:
    """The node id in a peer's certificate; that the peer owns it is what TLS shows. Raises ProtocolViolation."""
    if len(der) > _MAX_CERTIFICATE_BYTES:
        raise ProtocolViolation("a certificate of absurd size")
    try:
        public = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ProtocolViolation("a certificate that cannot be read") from error
    if not isinstance(public, Ed25519PublicKey):
        raise ProtocolViolation("a certificate without an Ed25519 key")
    return public.public_bytes_raw()
