"""Certificates carry a key and nothing else that counts."""

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from potluck.core.errors import ProtocolViolation
from potluck.identity.certificates import certificate_node_id, certificate_pem
from potluck.identity.keys import NodeKey


def der_of(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def test_the_key_comes_out_again() -> None:
    key = NodeKey.generate()
    assert certificate_node_id(der_of(certificate_pem(key))) == key.node_id


def test_the_certificate_holds_no_secret() -> None:
    assert b"PRIVATE" not in certificate_pem(NodeKey.generate())


@pytest.mark.parametrize("der", [b"", b"rubbish", b"\x30\x80" + bytes(100), b"\x30" * 20_000])
def test_rubbish_is_a_violation(der: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        certificate_node_id(der)


def test_every_cut_of_a_certificate_is_a_violation() -> None:
    der = der_of(certificate_pem(NodeKey.generate()))
    for size in range(len(der)):
        with pytest.raises(ProtocolViolation):
            certificate_node_id(der[:size])


def test_other_kinds_of_keys_are_a_violation() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    date = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    builder = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    )
    certificate = builder.not_valid_before(date).not_valid_after(date).sign(key, hashes.SHA256())
    with pytest.raises(ProtocolViolation, match="Ed25519"):
        certificate_node_id(certificate.public_bytes(serialization.Encoding.DER))
