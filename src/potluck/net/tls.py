"""Links over TLS 1.3. The accepter's certificate carries its node key, which the dialer pins; the dialer signs, as on plain TCP.

Python's ssl cannot ask for unknown self-signed client certificates, hence the signature; it verifies no chain here, because the key
itself is what we know a node by. See wire/handshake.py for what is signed.
"""

import contextlib
import os
import ssl
import sys
import tempfile
from collections.abc import Iterator

from potluck.identity.certificates import certificate_pem
from potluck.identity.keys import NodeKey
from potluck.net.host_limits import HostLimits
from potluck.net.link import Admits
from potluck.net.tcp import HANDSHAKE_TIMEOUT_S, TcpTransport


class TlsTransport(TcpTransport):
    """Makes links for one node, over TLS 1.3 and nothing older."""

    def __init__(
        self,
        key: NodeKey,
        admits: Admits,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        limits: HostLimits | None = None,
    ) -> None:
        super().__init__(key, admits, handshake_timeout_s, limits)
        self._dialing = _client_context()
        self._accepting = _server_context(key)

    def _dialer_context(self) -> ssl.SSLContext:
        return self._dialing

    def _accepter_context(self) -> ssl.SSLContext:
        return self._accepting


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the connection compares the certificate's key before it sends a byte
    return context


def _server_context(key: NodeKey) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # links live long; resuming would skip the certificate
    with _readable_file(key.private_pem() + certificate_pem(key)) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _readable_file(data: bytes) -> Iterator[str]:
    """OpenSSL reads keys from files only. On Linux this one has no name and no disk; elsewhere it lives for a moment, mode 0600."""
    if sys.platform == "linux":
        handle = os.memfd_create("certificate", os.MFD_CLOEXEC)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{handle}"
        return
    handle, path = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        yield path
    finally:
        os.unlink(path)
