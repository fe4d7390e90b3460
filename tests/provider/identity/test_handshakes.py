"""Tests the provider's certificates in real TLS and gRPC handshakes."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import provider.identity.authority as identity
from provider.identity.authority import StateDir, issue_server_certificate, peer_identity
from provider.identity.registry import enroll
from tests.support.identities import ENDPOINT, certificate_in, serial_of
from tests.support.waiting import WAIT_S

# ---- TLS over loopback ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    server_error: OSError | None = None
    client_error: OSError | None = None
    version: str | None = None
    peer_der: bytes | None = None


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> Outcome:
    """Makes one connection, on which both sides exchange a byte. With TLS 1.3 a client learns of a refusal only when it
    reads."""
    outcome = Outcome()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            raw, _ = listener.accept()
            raw.settimeout(WAIT_S)
            with raw:
                try:
                    with server.wrap_socket(raw, server_side=True) as secured:
                        outcome.version, outcome.peer_der = secured.version(), secured.getpeercert(binary_form=True)
                        secured.sendall(b"!")
                        secured.recv(1)
                except OSError as exc:
                    outcome.server_error = exc

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), WAIT_S) as raw,
                client.wrap_socket(raw, server_hostname=host) as secured,
            ):
                assert secured.recv(1) == b"!"
                secured.sendall(b"!")
        except OSError as exc:
            outcome.client_error = exc
        thread.join(WAIT_S)
    return outcome


def load_pair(context: ssl.SSLContext, key_pem: bytes, cert_pem: bytes, folder: Path) -> None:
    folder.mkdir(exist_ok=True)  # ssl reads a key only from a file
    (folder / "pair.pem").write_bytes(key_pem + cert_pem)
    context.load_cert_chain(folder / "pair.pem")


def server_context(state: StateDir, folder: Path, host: str = "127.0.0.1") -> ssl.SSLContext:
    key_pem, cert_pem, ca_pem = issue_server_certificate(state, host)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=ca_pem.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    load_pair(context, key_pem, cert_pem, folder / "server-pair")
    return context


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "gpu7.example.org"])
def test_a_tenant_is_accepted_over_tls_1_3(state: StateDir, tmp_path: Path, host: str) -> None:
    record = enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    server = server_context(state, tmp_path, "gpu7.example.org")
    outcome = handshake(server, client_context(tmp_path / "acme"), host)
    assert (outcome.server_error, outcome.client_error, outcome.version) == (None, None, "TLSv1.3")
    assert outcome.peer_der is not None
    found = peer_identity(ssl.DER_cert_to_PEM_cert(outcome.peer_der).encode())
    assert (found.name, found.serial) == ("acme", serial_of(record))


def test_the_server_is_refused_under_another_name(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    outcome = handshake(server_context(state, tmp_path), client_context(tmp_path / "acme"), "elsewhere.example.org")
    assert "Hostname mismatch" in str(outcome.client_error)


@pytest.mark.parametrize("check_hostname", [True, False])
def test_a_tenant_cannot_act_as_the_server(state: StateDir, tmp_path: Path, check_hostname: bool) -> None:
    enroll(state, "victim", tmp_path / "victim", ENDPOINT)
    enroll(state, "localhost", tmp_path / "localhost", ENDPOINT)  # this name is the most like a server's
    impostor = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    impostor.load_cert_chain(tmp_path / "localhost/cert.pem", tmp_path / "localhost/key.pem")
    victim = client_context(tmp_path / "victim")
    victim.check_hostname = check_hostname  # if this is off, the extended key usage alone must refuse the certificate
    outcome = handshake(impostor, victim)
    assert isinstance(outcome.client_error, ssl.SSLCertVerificationError)
    assert "purpose" in str(outcome.client_error)


def test_the_server_cannot_act_as_a_tenant(state: StateDir, tmp_path: Path) -> None:
    key_pem, cert_pem, ca_pem = issue_server_certificate(state, "localhost")
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=ca_pem.decode())
    load_pair(client, key_pem, cert_pem, tmp_path / "client-pair")
    assert "purpose" in str(handshake(server_context(state, tmp_path), client).server_error)


def test_a_client_without_a_certificate_is_refused(state: StateDir, tmp_path: Path) -> None:
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=state.ca.pem.decode())
    outcome = handshake(server_context(state, tmp_path), client)
    assert isinstance(outcome.server_error, ssl.SSLError)
    assert outcome.client_error is not None


def test_another_providers_tenant_is_refused(state: StateDir, tmp_path: Path) -> None:
    foreign = StateDir(tmp_path / "foreign")  # this CA has the same subject, so only the signature differs
    assert foreign.ca.certificate.subject == state.ca.certificate.subject
    enroll(foreign, "acme", tmp_path / "acme", ENDPOINT)
    (tmp_path / "acme/ca.pem").write_bytes(state.ca.pem)
    outcome = handshake(server_context(state, tmp_path), client_context(tmp_path / "acme"))
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)


def test_an_unrelated_cas_client_is_refused(state: StateDir, tmp_path: Path) -> None:
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=state.ca.pem.decode())
    trustme.CA().issue_cert("acme").configure_cert(client)
    outcome = handshake(server_context(state, tmp_path), client)
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)


def test_a_tenant_cannot_issue_certificates(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    key = serialization.load_pem_private_key((tmp_path / "acme/key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    acme = identity.CertificateAuthority(certificate_in(tmp_path / "acme"), key)
    key_pem, forged = identity.issue_tenant_certificate(acme, "other", 1, datetime.now(UTC))
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=state.ca.pem.decode())
    chain = forged.public_bytes(serialization.Encoding.PEM) + (tmp_path / "acme/cert.pem").read_bytes()
    load_pair(client, key_pem, chain, tmp_path / "forged")
    outcome = handshake(server_context(state, tmp_path), client)
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)


def test_an_expired_tenant_is_refused(state: StateDir, tmp_path: Path) -> None:
    enroll(state, "acme", tmp_path / "acme", ENDPOINT, days=30, now=datetime.now(UTC) - timedelta(days=31))
    outcome = handshake(server_context(state, tmp_path), client_context(tmp_path / "acme"))
    assert isinstance(outcome.server_error, ssl.SSLCertVerificationError)
    assert "expired" in str(outcome.server_error)


# ---- gRPC, which verifies with BoringSSL and not with OpenSSL -------------------------------------------------------


class WhoAmI(grpc.GenericRpcHandler):
    """Replies with the tenant's name."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            return peer_identity(context.auth_context()["x509_pem_cert"][0]).name.encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def serve() -> Iterator[Callable[[grpc.ServerCredentials], int]]:
    servers: list[grpc.Server] = []

    def start(credentials: grpc.ServerCredentials) -> int:
        server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(WhoAmI(),))
        servers.append(server)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return port

    yield start
    for server in servers:
        server.stop(None).wait(WAIT_S)


def who_am_i(port: int, folder: Path) -> bytes:
    parts = [(folder / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
    with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*parts)) as channel:
        answer: bytes = channel.unary_unary("/veilbase/WhoAmI")(b"", timeout=WAIT_S)
        return answer


def test_grpc_names_the_tenant(state: StateDir, tmp_path: Path, serve: Callable[[grpc.ServerCredentials], int]) -> None:
    key_pem, cert_pem, ca_pem = issue_server_certificate(state, "127.0.0.1")
    port = serve(grpc.ssl_server_credentials([(key_pem, cert_pem)], ca_pem, require_client_auth=True))
    enroll(state, "acme", tmp_path / "acme", ENDPOINT)
    assert who_am_i(port, tmp_path / "acme") == b"acme"
    enroll(state, "old", tmp_path / "old", ENDPOINT, days=30, now=datetime.now(UTC) - timedelta(days=31))
    enroll(StateDir(tmp_path / "foreign"), "acme", tmp_path / "foreigner", ENDPOINT)
    (tmp_path / "foreigner/ca.pem").write_bytes(ca_pem)
    for folder in ("old", "foreigner"):
        with pytest.raises(grpc.RpcError) as caught:
            who_am_i(port, tmp_path / folder)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_grpc_refuses_a_tenant_as_the_server(
    state: StateDir, tmp_path: Path, serve: Callable[[grpc.ServerCredentials], int]
) -> None:
    enroll(state, "localhost", tmp_path / "impostor", ENDPOINT)
    enroll(state, "victim", tmp_path / "victim", ENDPOINT)
    key_pem, cert_pem = ((tmp_path / "impostor" / name).read_bytes() for name in ("key.pem", "cert.pem"))
    port = serve(grpc.ssl_server_credentials([(key_pem, cert_pem)], state.ca.pem, require_client_auth=True))
    with pytest.raises(grpc.RpcError) as caught:
        who_am_i(port, tmp_path / "victim")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
