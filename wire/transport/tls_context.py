"""This module makes the TLS contexts of both ends of a tensor stream: TLS 1.3, with certificates on both sides
(wire/SPEC.md, section 1).

Guarantees: no file that a private key is written to outlives the call.
"""

from __future__ import annotations

import os
import ssl
import tempfile

ALPN = "veilbase/1"
IPC_ALPN = "veilbase-ipc/1"
"""The application protocol on a Unix socket. It differs from the TCP ports' protocol, so that neither end can be led
from a port that stays encrypted to a socket that does not, or the other way round."""


def client_context(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, alpn: str = ALPN) -> ssl.SSLContext:
    """Returns the TLS context of the tenant's end. The context also checks the name of the provider's host.

    Args:
        ca_pem, cert_pem, key_pem: the certificate of the provider's CA, this end's certificate and its key.
        alpn: the one application protocol that this end speaks.

    Raises:
        ssl.SSLError: OpenSSL does not accept a certificate or the key.
        ValueError: `ca_pem` is not ASCII.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, ca_pem, cert_pem, key_pem, alpn)


def server_context(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, alpn: str = ALPN) -> ssl.SSLContext:
    """Returns the TLS context of the provider's end, which demands a certificate of the provider's CA; see
    `client_context`."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, ca_pem, cert_pem, key_pem, alpn)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # No session is ever resumed.
    return context


def _context(protocol: int, ca_pem: bytes, cert_pem: bytes, key_pem: bytes, alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([alpn])
    context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    # The ssl module reads keys from files only. On Linux the file is in memory; elsewhere it is deleted soon.
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("veilbase", os.MFD_CLOEXEC), "wb") as file:
            file.write(key_pem + b"\n" + cert_pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    else:  # pragma: no cover - not Linux
        with tempfile.NamedTemporaryFile() as named:
            named.write(key_pem + b"\n" + cert_pem)
            named.flush()
            context.load_cert_chain(named.name)
    return context
