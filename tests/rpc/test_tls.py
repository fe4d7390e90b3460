"""Tests which peers are admitted: certificates that are missing, foreign, expired or revoked, and the TLS version
between tenant and provider."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch

from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_model import ServedModel
from provider.net.admission import MAX_CALLS_PER_TENANT
from tests.support.commands import Serving
from tests.support.identities import expired_identity, foreign_identity, unregistered_identity
from tests.support.providers import Provider
from tests.support.raw_peers import RawStream
from tests.support.ring_products import CALL, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S
from wire.errors import AccessError, NotPermitted, Unauthenticated, VeilbaseError, WireCode
from wire.transport.grpc_channel import BUNDLE_METHOD, MANIFEST_METHOD, WEIGHTS_METHOD
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity

TLS_1_3 = 0x0304


@pytest.mark.parametrize("make", [foreign_identity, expired_identity, unregistered_identity])
def test_an_identity_that_is_not_ours_is_refused(
    provider: Provider,
    tmp_path: Path,
    make: Callable[[Path, Provider], TlsIdentity],
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = GrpcConnection(provider.url, make(tmp_path, provider))
    with pytest.raises(Unauthenticated):
        connection.manifest()
    connection.close()
    # gRPC does not tell of handshakes that it refuses, so only a certificate that passes TLS has a line.
    passes = make is unregistered_identity
    assert refusals(caplog) == [("refused: its certificate is not in the registry", "ghost")] * passes
    assert_served(provider.connect("honest"), provider.served_model)


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    """Returns message and tenant of each line about a refusal."""
    found = [(one.getMessage(), getattr(one, "tenant", None)) for one in caplog.records]
    return [one for one in found if one[0].startswith("refused: ")]


def test_a_certificate_that_expired_is_named_once(
    provider: Provider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider.service.look_at_dates_at = float("inf")  # so the sweep does not look meanwhile
    expired_identity(tmp_path, provider)
    provider.identity("honest")
    for _ in range(2):
        provider.service.name_expired(float("inf"))
    said = [one.getMessage() for one in caplog.records if "has expired" in one.getMessage()]
    assert said == ["refused since the certificate has expired, until they are enrolled again: late"]


@pytest.mark.parametrize("tensor_port", [0, None])
def test_a_revoked_tenant_and_one_with_too_many_calls_have_a_line_each(
    start: Callable[..., Provider],
    tiny_served_model: ServedModel,
    tensor_port: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = start(tiny_served_model, tensor_port=tensor_port)
    fired = provider.connect("fired")
    assert_served(fired, provider.served_model)
    revoke(provider.state, "fired")
    with pytest.raises(NotPermitted):
        ask(fired, ring_rows(3))
    streams = [RawStream(provider, "many") for _ in range(MAX_CALLS_PER_TENANT)]
    for _ in range(3):
        with pytest.raises((VeilbaseError, grpc.RpcError, StopIteration, AssertionError)):
            RawStream(provider, "many")
    assert set(refusals(caplog)) == {
        ("refused: its certificate was revoked", "fired"),
        ("refused: it has too many calls open", "many"),
    }
    assert len(refusals(caplog)) == 2
    for one in streams:
        one.close()


def test_no_certificate_is_refused(provider: Provider) -> None:
    credentials = grpc.ssl_channel_credentials(provider.state.ca.pem)
    with grpc.secure_channel(f"127.0.0.1:{provider.server.port}", credentials) as channel:
        for method in (MANIFEST_METHOD, BUNDLE_METHOD, WEIGHTS_METHOD):
            with pytest.raises(grpc.RpcError):
                list(channel.unary_stream(method)(b"config.json", timeout=WAIT_S))


def test_plain_text_to_a_tls_port_is_refused(provider: Provider) -> None:
    connection = GrpcConnection(f"grpc://127.0.0.1:{provider.server.port}")
    with pytest.raises(VeilbaseError):
        connection.manifest()
    connection.close()


def test_a_provider_with_another_ca_is_refused(
    start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel
) -> None:
    first, second = start(tiny_served_model), start(tiny_served_model)
    connection = GrpcConnection(second.url, first.identity())
    with pytest.raises(Unauthenticated):
        connection.manifest()
    connection.close()


def test_revocation_ends_an_open_stream(provider: Provider) -> None:
    connection, other = provider.connect("fired"), provider.connect("kept")
    assert_served(connection, provider.served_model)
    assert_served(other, provider.served_model)
    revoke(provider.state, "fired")
    with pytest.raises(NotPermitted):
        ask(connection, ring_rows(3))
    with pytest.raises(AccessError):
        ask(connection, ring_rows(3))  # a new stream is also refused
    assert_served(other, provider.served_model)


def test_revocation_ends_an_idle_stream(provider: Provider) -> None:
    stream = RawStream(provider, "idle")
    revoke(provider.state, "idle")
    stream.expect_error(0, WireCode.NOT_PERMITTED)  # the sweep ends it without a request
    stream.expect_end()
    stream.close()


def test_revocation_ends_a_stream_that_idles_after_small_calls(provider: Provider) -> None:
    """The stream receives nothing any more, so only the sweep, in another thread, can end it."""
    connection = provider.connect("idle")
    for _ in range(3):
        ask(connection, ring_rows(1))
    stream = connection._stream
    assert stream is not None
    revoke(provider.state, "idle")
    assert stream._ended.wait(WAIT_S)  # the listener reads while nothing is sent, and finds the end
    with pytest.raises(AccessError):
        ask(connection, ring_rows(1))
    connection.close()


@pytest.mark.parametrize("method", [MANIFEST_METHOD, BUNDLE_METHOD, WEIGHTS_METHOD])
def test_revocation_closes_the_other_methods(provider: Provider, method: str) -> None:
    identity = provider.identity("fired")
    revoke(provider.state, "fired")
    credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
    with grpc.secure_channel(f"127.0.0.1:{provider.server.port}", credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(method)(b"config.json", timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_registry_that_cannot_be_read_admits_nobody(provider: Provider) -> None:
    connection = provider.connect()
    assert_served(connection, provider.served_model)
    saved = provider.state.tenants_path.read_bytes()
    provider.state.tenants_path.write_text("{")
    with pytest.raises(AccessError):
        ask(connection, ring_rows(3))
    provider.state.tenants_path.write_bytes(saved)
    assert_served(connection, provider.served_model)


def test_openssl_negotiates_tls_1_3(provider: Provider) -> None:
    provider.identity()
    context = ssl.create_default_context(cadata=provider.state.ca.pem.decode())
    context.load_cert_chain(provider.folder / "acme" / "cert.pem", provider.folder / "acme" / "key.pem")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", provider.server.port), WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        assert secured.version() == "TLSv1.3"


def versions(port: int, ca_pem: bytes, identity: Path, highest: ssl.TLSVersion) -> str | None:
    """Returns the TLS version on which an OpenSSL client that offers all its suites agrees with the server; None if it
    is refused."""
    context = ssl.create_default_context(cadata=ca_pem.decode())
    context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:COMPLEMENTOFALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, highest
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
                return secured.version()
        except OSError:
            return None


def test_a_server_in_a_process_that_had_loaded_grpc_takes_tls_1_2_as_well(provider: Provider) -> None:
    """docs/threat-model.md states this for servers other than `provider serve`. It also shows that the client of these
    tests can use TLS 1.2."""
    provider.identity()
    for highest, agreed in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        found = versions(provider.server.port, provider.state.ca.pem, provider.folder / "acme", highest)
        assert found == agreed


def test_provider_serve_speaks_tls_1_3_alone(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-ECDSA-AES256-GCM-SHA384")  # the operator's, which allows 1.2
    serving = Serving("--tls", "--model", model, "--port", 0, "--state", tmp_path / "state")
    try:
        state, folder = StateDir(tmp_path / "state"), tmp_path / "acme"
        enroll(state, "acme", folder, serving.url)
        connection = GrpcConnection(serving.url, TlsIdentity.read(folder))
        tensor_port = connection.manifest().tensor_port
        connection.close()
        assert tensor_port is not None
        port = int(serving.url.rsplit(":", 1)[1])
        assert versions(port, state.ca.pem, folder, ssl.TLSVersion.TLSv1_2) is None
        assert versions(port, state.ca.pem, folder, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        assert versions(tensor_port, state.ca.pem, folder, ssl.TLSVersion.TLSv1_2) is None
    finally:
        code, _, err = serving.stop()
    assert code == 0, err
    assert "TLS 1.2" not in err


class Relay:
    """Runs a loopback relay that keeps the first bytes of the server, which are its ServerHello."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.from_server = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()
        except OSError:
            return  # closed

    def _pump(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(65536):
                if keep and len(self.from_server) < 4096:
                    self.from_server += data
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            one.close()

    def close(self) -> None:
        self._listener.close()


def selected_version(server_hello: bytes) -> int:
    """Returns the version that a ServerHello selects (RFC 8446, sections 4.1.3 and 4.2.1)."""
    assert server_hello[0] == 22  # a handshake record
    assert server_hello[5] == 2  # ServerHello
    legacy = int.from_bytes(server_hello[9:11], "big")
    at = 11 + 32
    at += 1 + server_hello[at] + 2 + 1  # session id, cipher suite, compression
    end = at + 2 + int.from_bytes(server_hello[at : at + 2], "big")
    at += 2
    while at < end:
        kind, size = (int.from_bytes(server_hello[at + k : at + k + 2], "big") for k in (0, 2))
        if kind == 43:  # supported_versions
            return int.from_bytes(server_hello[at + 4 : at + 4 + size], "big")
        at += 4 + size
    return legacy


def test_our_own_ends_negotiate_tls_1_3(provider: Provider) -> None:
    relay = Relay(provider.server.port)
    connection = GrpcConnection(f"grpcs://127.0.0.1:{relay.port}", provider.identity())
    rows = ring_rows(2)
    assert torch.equal(ask(connection, rows), provider.served_model.compute(CALL, rows))
    connection.close()
    relay.close()
    assert selected_version(relay.from_server) == TLS_1_3
